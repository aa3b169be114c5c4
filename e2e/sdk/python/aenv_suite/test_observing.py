"""What is told of a sandbox: what it uses, and how lists are filtered and ordered."""

import datetime
import unittest
import uuid

from e2b import Sandbox, SandboxNotFoundException, SandboxQuery, SandboxState

from .support import TEMPLATE, every_page, fresh_name, shared_sandbox, wait_until


def now():
    return datetime.datetime.now(datetime.timezone.utc)


class Metrics(unittest.TestCase):
    def test_a_running_sandbox_has_metrics(self):
        sandbox = shared_sandbox()
        wait_until(lambda: len(sandbox.get_metrics()) > 0, 30, "a first sample")
        metric = sandbox.get_metrics()[-1]
        self.assertEqual(metric.cpu_count, sandbox.get_info().cpu_count)
        self.assertTrue(0 <= metric.cpu_used_pct <= 100)
        self.assertTrue(0 < metric.mem_used < metric.mem_total)
        self.assertTrue(0 < metric.disk_used <= metric.disk_total)
        self.assertLess(abs((now() - metric.timestamp).total_seconds()), 60)
        with self.subTest("a window before it was there is empty"):
            hour = datetime.timedelta(hours=1)
            self.assertEqual(sandbox.get_metrics(start=now() - 2 * hour, end=now() - hour), [])
        with self.subTest("a window around it is not"):
            self.assertGreater(len(sandbox.get_metrics(start=now() - hour, end=now() + hour)), 0)

    def test_nobody_has_none(self):
        with self.assertRaises(SandboxNotFoundException):
            Sandbox.get_metrics(str(uuid.uuid4()))


class Lists(unittest.TestCase):
    def test_order_pages_start_and_template(self):
        tag = {"suite": fresh_name("lists")}
        first = Sandbox.create(TEMPLATE, timeout=120, metadata=tag)
        self.addCleanup(first.kill)
        second = Sandbox.create(TEMPLATE, timeout=120, metadata=tag)
        self.addCleanup(second.kill)

        def ids(limit=None, order=None, **query):
            paginator = Sandbox.list(query=SandboxQuery(metadata=tag, **query), limit=limit, order=order)
            return [info.sandbox_id for info in every_page(paginator)]

        newest_first = [second.sandbox_id, first.sandbox_id]
        with self.subTest("the newest comes first, or last"):
            self.assertEqual(ids(), newest_first)
            self.assertEqual(ids(order="asc"), newest_first[::-1])
        with self.subTest("pages neither repeat nor hide"):
            self.assertEqual(ids(limit=1), newest_first)
            self.assertEqual(ids(limit=1, order="asc"), newest_first[::-1])
        with self.subTest("a start is inclusive"):
            started = second.get_info().started_at
            self.assertEqual(ids(started_after=started), [second.sandbox_id])
            self.assertEqual(ids(started_after=started + datetime.timedelta(hours=1)), [])
        with self.subTest("a template is found by its name, and one that is not there has none"):
            self.assertEqual(ids(template=TEMPLATE), newest_first)
            self.assertEqual(ids(template=fresh_name("none")), [])
        with self.subTest("states"):
            second.pause()
            both = [SandboxState.RUNNING, SandboxState.PAUSED]
            self.assertEqual(ids(state=both), newest_first)
            self.assertEqual(ids(state=[SandboxState.PAUSED]), [second.sandbox_id])
