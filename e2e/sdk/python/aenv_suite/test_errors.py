"""What the SDK makes of our refusals."""

import unittest
import uuid

from e2b import AuthenticationException, Sandbox, SandboxException, SandboxNotFoundException

from .support import TEMPLATE


class Errors(unittest.TestCase):
    wrong_key = "e2b_" + "0" * 40
    nobody = str(uuid.uuid4())

    def test_a_wrong_key_is_an_authentication_error(self):
        with self.assertRaises(AuthenticationException):
            Sandbox.create(TEMPLATE, api_key=self.wrong_key)
        with self.assertRaises(AuthenticationException):
            Sandbox.list(api_key=self.wrong_key).next_items()

    def test_an_unknown_template_is_named(self):
        with self.assertRaises(SandboxException) as caught:
            Sandbox.create("no-such-template")
        self.assertIn("no-such-template", str(caught.exception))

    def test_killing_nobody_is_false(self):
        self.assertFalse(Sandbox.kill(self.nobody))

    def test_asking_for_nobody_is_not_found(self):
        with self.assertRaises(SandboxNotFoundException):
            Sandbox.get_info(self.nobody)
        with self.assertRaises(SandboxNotFoundException):
            Sandbox.connect(self.nobody)
        with self.assertRaises(SandboxNotFoundException):
            Sandbox.set_timeout(self.nobody, 10)
