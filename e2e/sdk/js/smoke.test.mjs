// Smoke suite: the official E2B JavaScript SDK, unmodified, against a running AgentENV server.
//
// Reads E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY (as the SDK does) and AENV_TEMPLATE, the template to start from.
// One sandbox serves all tests that leave it as they found it: a boot takes seconds under emulation.

import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'

import {
  AuthenticationError,
  CommandExitError,
  FileNotFoundError,
  FileType,
  NotFoundError,
  Sandbox,
  SandboxError,
  TimeoutError,
} from 'e2b'

import { NOBODY, TEMPLATE, freshName, listed, waitUntil } from './support.mjs'

describe('a sandbox that goes on running', () => {
  let sandbox

  before(async () => {
    sandbox = await Sandbox.create(TEMPLATE, { timeoutMs: 600_000 })
  })
  after(async () => {
    await sandbox?.kill()
  })

  describe('commands', () => {
    test('run gives stdout, stderr and exit code', async () => {
      const result = await sandbox.commands.run('echo out; echo err >&2')
      assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['out\n', 'err\n', 0])
    })

    test('a nonzero exit is an error with all the output', async () => {
      await assert.rejects(sandbox.commands.run('echo before; echo why >&2; exit 7'), (error) => {
        assert.ok(error instanceof CommandExitError)
        assert.deepEqual([error.exitCode, error.stdout, error.stderr], [7, 'before\n', 'why\n'])
        return true
      })
    })

    test('environment, working directory and user are the caller’s', async () => {
      const asked = { envs: { GREETING: 'hello there' }, cwd: '/usr', user: 'root' }
      const result = await sandbox.commands.run('echo $GREETING; pwd; id -un', asked)
      assert.equal(result.stdout, 'hello there\n/usr\nroot\n')
    })

    test('large output arrives whole', async () => {
      const result = await sandbox.commands.run("head -c 1000000 /dev/zero | tr '\\0' x")
      assert.equal(result.stdout.length, 1_000_000)
    })

    test('a command in the background is listed and waited for', async () => {
      const handle = await sandbox.commands.run('sleep 1; echo done', { background: true })
      const pids = async () => (await sandbox.commands.list()).map((process) => process.pid)
      assert.ok((await pids()).includes(handle.pid))
      assert.equal((await handle.wait()).stdout, 'done\n')
      assert.ok(!(await pids()).includes(handle.pid))
    })

    test('a command in the background can be killed once', async () => {
      const handle = await sandbox.commands.run('sleep 600', { background: true })
      assert.equal(await handle.kill(), true)
      await assert.rejects(handle.wait(), CommandExitError)
      assert.equal(await sandbox.commands.kill(handle.pid), false)
    })

    test('a running command can be connected to', async () => {
      const first = await sandbox.commands.run('sleep 1; echo heard by all', { background: true })
      const second = await sandbox.commands.connect(first.pid)
      assert.equal((await second.wait()).stdout, 'heard by all\n')
      await first.disconnect()
    })

    test('connecting to no command is an error', async () => {
      await assert.rejects(sandbox.commands.connect(999_999), NotFoundError)
    })

    test('stdin is sent and closed', async () => {
      const handle = await sandbox.commands.run('cat', { background: true, stdin: true })
      await sandbox.commands.sendStdin(handle.pid, 'first\n')
      await sandbox.commands.sendStdin(handle.pid, 'second\n')
      await sandbox.commands.closeStdin(handle.pid)
      assert.equal((await handle.wait()).stdout, 'first\nsecond\n')
    })

    test('a command that takes too long is ended', async () => {
      await assert.rejects(sandbox.commands.run('sleep 600', { timeoutMs: 1000 }), TimeoutError)
    })
  })

  describe('files', () => {
    let dir

    before(async () => {
      dir = `/home/user/${freshName('files')}`
      await sandbox.files.makeDir(dir)
    })
    after(async () => {
      await sandbox.files.remove(dir)
    })

    test('text is read as it was written', async () => {
      const written = await sandbox.files.write(`${dir}/note.txt`, 'grüße\n')
      assert.deepEqual([written.name, written.path], ['note.txt', `${dir}/note.txt`])
      assert.equal(await sandbox.files.read(`${dir}/note.txt`), 'grüße\n')
    })

    test('bytes are exact', async () => {
      const data = Uint8Array.from({ length: 1 << 20 }, (_, index) => (index * 7) & 0xff)
      await sandbox.files.write(`${dir}/blob`, data.buffer)
      assert.deepEqual(await sandbox.files.read(`${dir}/blob`, { format: 'bytes' }), data)
    })

    test('several files are written at once', async () => {
      const files = [0, 1, 2].map((n) => ({ path: `${dir}/many/${n}`, data: String(n) }))
      const written = await sandbox.files.write(files)
      assert.deepEqual(written.map((info) => info.name), ['0', '1', '2'])
      assert.equal(await sandbox.files.read(`${dir}/many/2`), '2')
    })

    test('list, exists, rename, remove and makeDir agree', async () => {
      const at = `${dir}/tree`
      assert.equal(await sandbox.files.makeDir(at), true)
      assert.equal(await sandbox.files.makeDir(at), false)
      await sandbox.files.write(`${at}/old`, 'kept')
      await sandbox.files.rename(`${at}/old`, `${at}/new`)
      const entries = await sandbox.files.list(at)
      assert.deepEqual(entries.map((entry) => [entry.name, entry.type]), [['new', FileType.FILE]])
      assert.equal(await sandbox.files.exists(`${at}/old`), false)
      await sandbox.files.remove(at)
      assert.equal(await sandbox.files.exists(at), false)
    })

    test('information about a file is what the disk says', async () => {
      await sandbox.files.write(`${dir}/mine`, 'x')
      const info = await sandbox.files.getInfo(`${dir}/mine`)
      assert.deepEqual([info.owner, info.size, info.type], ['user', 1, FileType.FILE])
    })

    test('reading what is not there is not found', async () => {
      await assert.rejects(sandbox.files.read(`${dir}/missing`), FileNotFoundError)
    })
  })

  describe('life', () => {
    test('it is running and known', async () => {
      assert.equal(await sandbox.isRunning(), true)
      const info = await sandbox.getInfo()
      assert.deepEqual([info.sandboxId, info.state], [sandbox.sandboxId, 'running'])
    })

    test('setTimeout moves the end', async () => {
      await sandbox.setTimeout(900_000)
      const { endAt } = await sandbox.getInfo()
      assert.ok(Math.abs(endAt - Date.now() - 900_000) < 60_000)
    })

    test('connect reaches the same machine', async () => {
      await sandbox.files.write('/tmp/marker', 'here')
      const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 900_000 })
      assert.equal(await again.files.read('/tmp/marker'), 'here')
    })
  })
})

describe('from creation to kill', () => {
  test('a sandbox is found by its metadata, ends at kill, and is known no more', async () => {
    const metadata = { suite: freshName('tag'), 'with space & sign': 'a=b&c%' }
    const sandbox = await Sandbox.create(TEMPLATE, { timeoutMs: 120_000, metadata, envs: { COLOR: 'green' } })
    try {
      assert.equal((await sandbox.commands.run('echo $COLOR')).stdout, 'green\n')
      const found = await listed({ metadata })
      assert.deepEqual(found.map((info) => info.sandboxId), [sandbox.sandboxId])
      assert.deepEqual(found[0].metadata, metadata)
      assert.deepEqual(await listed({ metadata: { suite: 'other' } }), [])
      assert.deepEqual(await listed({ metadata, state: ['paused'] }), [])
    } finally {
      assert.equal(await sandbox.kill(), true)
    }
    assert.equal(await sandbox.isRunning(), false)
    assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
    assert.deepEqual(await listed({ metadata }), [])
  })

  test('a sandbox ends when its time is up', async () => {
    const sandbox = await Sandbox.create(TEMPLATE, { timeoutMs: 120_000 })
    try {
      await sandbox.setTimeout(1000)
      await waitUntil(async () => !(await sandbox.isRunning()), 20, 'the sandbox ended')
    } finally {
      await sandbox.kill()
    }
  })
})

describe('errors', () => {
  test('a wrong key is an authentication error', async () => {
    const apiKey = `e2b_${'0'.repeat(40)}`
    await assert.rejects(Sandbox.create(TEMPLATE, { apiKey }), AuthenticationError)
  })

  test('an unknown template is named', async () => {
    await assert.rejects(Sandbox.create('no-such-template'), (error) => {
      assert.ok(error instanceof SandboxError)
      assert.match(error.message, /no-such-template/)
      return true
    })
  })

  test('nobody is not found, and killing nobody is false', async () => {
    assert.equal(await Sandbox.kill(NOBODY), false)
    await assert.rejects(Sandbox.getInfo(NOBODY), NotFoundError)
    await assert.rejects(Sandbox.connect(NOBODY), NotFoundError)
  })
})
