"""sandbox.files"""

import os
import unittest

from e2b import FileNotFoundException, FileType, InvalidArgumentException

from .support import fresh_name, shared_sandbox


class Files(unittest.TestCase):
    def setUp(self):
        self.sandbox = shared_sandbox()
        self.files = self.sandbox.files
        self.dir = f"/home/user/{fresh_name('files')}"
        self.files.make_dir(self.dir)
        self.addCleanup(self.files.remove, self.dir)

    def test_text_is_read_as_it_was_written(self):
        written = self.files.write(f"{self.dir}/note.txt", "grüße\n")
        self.assertEqual((written.name, written.path), ("note.txt", f"{self.dir}/note.txt"))
        self.assertEqual(self.files.read(f"{self.dir}/note.txt"), "grüße\n")

    def test_bytes_are_exact(self):
        data = bytes(range(256)) * 4096 + os.urandom(7)
        self.files.write(f"{self.dir}/blob", data)
        self.assertEqual(bytes(self.files.read(f"{self.dir}/blob", format="bytes")), data)

    def test_an_empty_file_is_a_file(self):
        self.files.write(f"{self.dir}/empty", "")
        self.assertEqual(self.files.read(f"{self.dir}/empty"), "")

    def test_writing_replaces_the_whole_file(self):
        self.files.write(f"{self.dir}/f", "a longer text")
        self.files.write(f"{self.dir}/f", "short")
        self.assertEqual(self.files.read(f"{self.dir}/f"), "short")

    def test_writing_makes_missing_folders(self):
        self.files.write(f"{self.dir}/a/b/c.txt", "deep")
        self.assertEqual(self.files.read(f"{self.dir}/a/b/c.txt"), "deep")

    def test_several_files_are_written_at_once(self):
        written = self.files.write_files([{"path": f"{self.dir}/{n}", "data": str(n)} for n in range(3)])
        self.assertEqual([info.name for info in written], ["0", "1", "2"])
        self.assertEqual(self.files.read(f"{self.dir}/2"), "2")

    def test_a_relative_path_starts_at_home(self):
        name = fresh_name("relative")
        self.files.write(name, "home")
        self.addCleanup(self.files.remove, f"/home/user/{name}")
        self.assertEqual(self.files.read(f"/home/user/{name}"), "home")

    def test_written_files_belong_to_the_user(self):
        self.files.write(f"{self.dir}/mine", "x")
        info = self.files.get_info(f"{self.dir}/mine")
        self.assertEqual((info.owner, info.group, info.size, info.type), ("user", "user", 1, FileType.FILE))

    def test_commands_and_files_see_the_same_disk(self):
        self.files.write(f"{self.dir}/in", "from the sdk")
        self.sandbox.commands.run(f"tr a-z A-Z < {self.dir}/in > {self.dir}/out")
        self.assertEqual(self.files.read(f"{self.dir}/out"), "FROM THE SDK")

    def test_list_shows_files_and_folders(self):
        self.files.write(f"{self.dir}/file", "x")
        self.files.make_dir(f"{self.dir}/folder")
        entries = {entry.name: entry.type for entry in self.files.list(self.dir)}
        self.assertEqual(entries, {"file": FileType.FILE, "folder": FileType.DIR})

    def test_list_goes_as_deep_as_asked(self):
        self.files.write(f"{self.dir}/a/b/c", "x")
        names = lambda depth: sorted(entry.name for entry in self.files.list(self.dir, depth=depth))
        self.assertEqual(names(1), ["a"])
        self.assertEqual(names(3), ["a", "b", "c"])

    def test_make_dir_tells_whether_it_made_one(self):
        self.assertTrue(self.files.make_dir(f"{self.dir}/new/nested"))
        self.assertFalse(self.files.make_dir(f"{self.dir}/new/nested"))

    def test_exists_and_remove(self):
        self.files.write(f"{self.dir}/gone/soon", "x")
        self.assertTrue(self.files.exists(f"{self.dir}/gone/soon"))
        self.files.remove(f"{self.dir}/gone")
        self.assertFalse(self.files.exists(f"{self.dir}/gone/soon"))
        self.assertFalse(self.files.exists(f"{self.dir}/gone"))

    def test_rename_moves_a_file(self):
        self.files.write(f"{self.dir}/old", "kept")
        self.assertEqual(self.files.rename(f"{self.dir}/old", f"{self.dir}/new").path, f"{self.dir}/new")
        self.assertFalse(self.files.exists(f"{self.dir}/old"))
        self.assertEqual(self.files.read(f"{self.dir}/new"), "kept")

    def test_reading_what_is_not_there_is_not_found(self):
        with self.assertRaises(FileNotFoundException):
            self.files.read(f"{self.dir}/missing")
        with self.assertRaises(FileNotFoundException):
            self.files.list(f"{self.dir}/missing")

    def test_reading_a_folder_is_refused(self):
        with self.assertRaises(InvalidArgumentException):
            self.files.read(self.dir)
