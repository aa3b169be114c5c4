"""One story for the two halves of the SDK: what is written with `await done(...)` runs on either."""

import inspect
import unittest

import e2b

from . import support


async def done(value):
    """The value, waited for if it is one to wait for."""
    return await value if inspect.isawaitable(value) else value


class Both(unittest.IsolatedAsyncioTestCase):
    """A story; its classes are those of one half. Not run by itself."""

    Sandbox = Template = None

    async def shared(self):
        """The shared sandbox, in this half of the SDK."""
        return await done(self.Sandbox.connect(support.shared_sandbox().sandbox_id, timeout=900))

    async def create(self, template=support.TEMPLATE, **options):
        sandbox = await done(self.Sandbox.create(template, timeout=300, **options))
        self.addCleanup(e2b.Sandbox.kill, sandbox.sandbox_id)
        return sandbox

    async def assert_raises(self, kind, call, *args, **options):
        with self.assertRaises(kind) as caught:
            await done(call(*args, **options))
        return caught.exception


def both_halves(story):
    """Puts two runnable classes beside the story: `XSync` and `XAsync`."""
    module = inspect.getmodule(story)
    halves = {"Sync": (e2b.Sandbox, e2b.Template), "Async": (e2b.AsyncSandbox, e2b.AsyncTemplate)}
    for half, (sandbox, template) in halves.items():
        name = f"{story.__name__}{half}"
        members = {"Sandbox": sandbox, "Template": template, "__module__": module.__name__}
        setattr(module, name, type(name, (story, unittest.IsolatedAsyncioTestCase), members))
    return story


def load_halves(module):
    """A `load_tests` for modules of stories: the two halves, and not the story."""

    def load_tests(loader, _tests, _pattern):
        suite = unittest.TestSuite()
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Both) and value.Sandbox is not None:
                suite.addTests(loader.loadTestsFromTestCase(value))
        return suite

    return load_tests
