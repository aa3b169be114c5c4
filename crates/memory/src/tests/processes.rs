//! Another process: running, stopped, dead.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use aenv_vmm_driver::GuestMemory;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::support::*;
use crate::image::MemoryImage;
use crate::pages::PAGE;
use crate::{CaptureError, CaptureOptions, ScanError, capture, dirty_pages, touched_pages};

const IMAGE: &str = "AENV_TEST_MEMORY_IMAGE";

/// A process that maps an image and does to it what it is told.
pub(super) struct Vmm {
    process: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Vmm {
    pub(super) fn start(image: &Path) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tests::processes::the_vmm_of_a_test", "--ignored", "--nocapture"])
            .env(IMAGE, image)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (commands, answers) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        let mut vmm = Self { process, commands, answers };
        vmm.tell("read 0 0");
        vmm
    }

    /// Has it do something to a page.
    pub(super) fn tell(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
        let mut line = String::new();
        while !line.ends_with("done\n") {
            line.clear();
            assert_ne!(self.answers.read_line(&mut line).unwrap(), 0, "it lives");
        }
    }

    pub(super) fn memory(&self, image: &Path) -> GuestMemory {
        GuestMemory::of_image(self.process.id(), image).unwrap()
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id().cast_signed())
    }

    fn stop(&self) {
        kill(self.pid(), Signal::SIGSTOP).unwrap();
        self.wait_for_state('T');
    }

    fn resume(&self) {
        kill(self.pid(), Signal::SIGCONT).unwrap();
    }

    /// Ends it; it is not waited for.
    fn kill(&self) {
        kill(self.pid(), Signal::SIGKILL).unwrap();
        self.wait_for_state('Z');
    }

    fn wait_for_state(&self, state: char) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
            if stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(state)) {
                return;
            }
            assert!(Instant::now() < deadline, "{stat} comes to {state}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "run by the tests of other processes"]
fn the_vmm_of_a_test() {
    let Some(image) = std::env::var_os(IMAGE) else {
        eprintln!("skipped: only of use to the tests that run it");
        return;
    };
    let mut guest = Guest::map(Path::new(&image));
    for command in std::io::stdin().lines() {
        let command = command.unwrap();
        let words: Vec<_> = command.split(' ').collect();
        let (page, byte): (u64, u8) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        match words[0] {
            "read" => drop(guest.read(page * PAGE)),
            "fill" => guest.fill(page, byte),
            other => panic!("{other}"),
        }
        println!("done");
    }
}

#[test]
fn a_stopped_process_is_captured_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let image_file = image_file(dir.path(), PAGES, false);
    let mut vmm = Vmm::start(&image_file);
    vmm.tell("fill 7 7");
    vmm.tell("fill 8 8");
    vmm.tell("fill 20 0");
    vmm.tell("read 30 0");
    vmm.stop();
    let memory = vmm.memory(&image_file);
    let dirty = dirty_pages(&memory).unwrap();
    assert_eq!(dirty, pages([7, 8, 20]));
    let captured = capture(&memory, &dirty, &dir.path().join("layer"), &CaptureOptions::default()).unwrap();
    let image = MemoryImage::empty(captured.memory).with_top(captured.layer.clone());
    let then = content(&memory);
    vmm.resume();
    vmm.tell("fill 7 9");
    captured.sync().unwrap();
    assert!(stacked(&image) == then, "what came later is not in it");
    assert_eq!((then[7 * PAGE as usize], then[8 * PAGE as usize]), (7, 8));
    let touched = numbers(&touched_pages(&memory).unwrap());
    assert!([0, 7, 8, 20, 30].iter().all(|page| touched.contains(page)), "{touched:?}");
}

#[test]
fn a_process_that_died_is_told_as_gone_and_not_as_one_that_wrote_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let image_file = image_file(dir.path(), PAGES, false);
    let mut vmm = Vmm::start(&image_file);
    vmm.tell("fill 7 7");
    let memory = vmm.memory(&image_file);
    let dirty = dirty_pages(&memory).unwrap();
    let out = dir.path().join("layer");
    vmm.kill(); // a zombie
    for waited_for in [false, true] {
        if waited_for {
            vmm.process.wait().unwrap();
        }
        for scanned in [dirty_pages(&memory), touched_pages(&memory)] {
            assert!(matches!(scanned, Err(ScanError::Gone { .. })), "{scanned:?}, waited for: {waited_for}");
        }
        let error = capture(&memory, &dirty, &out, &CaptureOptions::default()).unwrap_err();
        assert!(matches!(error, CaptureError::Gone { .. }), "{error:?}, waited for: {waited_for}");
        let left = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, 1, "nothing but the image");
    }
}
