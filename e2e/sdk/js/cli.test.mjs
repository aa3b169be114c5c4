// The official command-line client: what people do with templates and sandboxes.

import assert from 'node:assert/strict'
import { existsSync } from 'node:fs'
import { mkdtemp, mkdir, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, test } from 'node:test'

import { Sandbox } from 'e2b'

import { client } from './cli.mjs'
import { skip } from './record.mjs'
import { NOBODY, TEMPLATE, freshName, waitUntil } from './support.mjs'

const IMAGE = process.env.AENV_IMAGE
const hasScript = existsSync('/usr/bin/script')

let home, e2b

before(async () => {
  home = await mkdtemp(join(tmpdir(), 'aenv-e2b-'))
  e2b = client(home)
})
after(() => rm(home, { recursive: true, force: true }))

describe('the key', () => {
  test('is taken from the environment', async () => {
    JSON.parse(await e2b.printed('sandbox list', '--format', 'json'))
    await assert.rejects(client(home, { E2B_API_KEY: `e2b_${'0'.repeat(40)}` }).printed('sandbox list'), (error) => {
      assert.match(error.stdout + error.stderr, /401|[Uu]nauthorized|API key/)
      return true
    })
  })

  test('without one nobody is asked', async () => {
    await assert.rejects(client(home, { E2B_API_KEY: '' }).printed('sandbox list'), (error) => {
      assert.match(error.stdout + error.stderr, /E2B_API_KEY|logged in/)
      return true
    })
    assert.match(await e2b.printed('auth info'), /[Nn]ot logged in/)
  })
})

describe('a template', { skip: IMAGE ? false : 'AENV_IMAGE names no image to build on' }, () => {
  test('is built from a Dockerfile, listed, published and deleted', async (context) => {
    const missing = await e2b.lacks('template create')
    if (missing) return skip(context, missing)
    const folder = join(home, 'context')
    const name = freshName('cli')
    await mkdir(folder)
    await writeFile(join(folder, 'greeting.txt'), 'hello from the context\n')
    const recipe = [
      `FROM ${IMAGE}`,
      'ENV GREETING=hello',
      'RUN echo $GREETING > /srv/said',
      'COPY greeting.txt /srv/',
      'CMD sh -c "echo started > /tmp/started; sleep 3600"',
    ]
    await writeFile(join(folder, 'Dockerfile'), recipe.join('\n') + '\n')
    const options = ['--path', folder, '--memory-mb', '512', '--cpu-count', '1', '--ready-cmd', 'test -f /tmp/started']
    const built = await e2b.printed('template create', name, ...options).catch((error) => {
      if (!/E2B_ACCESS_TOKEN/.test(error.stderr)) throw error
    })
    if (!built) return skip(context, 'this client builds only for who has an access token of E2B’s cloud')
    assert.match(built, new RegExp(name))
    const sandbox = await Sandbox.create(name, { timeoutMs: 120_000 })
    try {
      const { stdout } = await sandbox.commands.run('cat /srv/said /srv/greeting.txt /tmp/started; id -un; pwd')
      assert.equal(stdout, 'hello\nhello from the context\nstarted\nuser\n/home/user\n')
      assert.equal((await sandbox.getInfo()).memoryMB, 512)
    } finally {
      await sandbox.kill()
    }
    const listed = async () => JSON.parse(await e2b.printed('template list', '--format', 'json'))
    const found = (await listed()).find((template) => template.aliases?.includes(name) || template.names?.includes(name))
    assert.ok(found, 'the template is listed')
    assert.match(await e2b.printed('template list'), new RegExp(name))
    await e2b.printed('template publish', name, '--yes')
    assert.equal((await listed()).find((template) => template.templateID === found.templateID).public, true)
    await e2b.printed('template unpublish', name, '--yes')
    await e2b.printed('template delete', name, '--yes')
    assert.equal((await listed()).some((template) => template.templateID === found.templateID), false)
  })

  test('is begun with files for the SDK', async (context) => {
    const missing = await e2b.lacks('template init')
    if (missing) return skip(context, missing)
    await e2b.printed('template init', '--path', home, '--name', 'begun', '--language', 'python-sync')
    assert.ok(existsSync(join(home, 'begun')))
  })
})

describe('a sandbox', () => {
  let sandbox
  const suite = freshName('cli')

  before(async () => {
    sandbox = await Sandbox.create(TEMPLATE, { timeoutMs: 600_000, metadata: { suite } })
  })
  after(() => sandbox?.kill())

  const listed = async (...options) => {
    const found = JSON.parse(await e2b.printed('sandbox list', '--format', 'json', '--metadata', `suite=${suite}`, ...options))
    return found.map((info) => info.sandboxId ?? info.sandboxID)
  }

  test('is listed by state and metadata, and told about', async () => {
    assert.deepEqual(await listed(), [sandbox.sandboxId])
    assert.deepEqual(await listed('--state', 'paused'), [])
    assert.match(await e2b.printed('sandbox list'), new RegExp(sandbox.sandboxId))
    const info = JSON.parse(await e2b.printed('sandbox info', sandbox.sandboxId, '--format', 'json'))
    assert.equal(info.sandboxId ?? info.sandboxID, sandbox.sandboxId)
  })

  test('runs a command with its input and exit status', async () => {
    const run = e2b.started('sandbox exec', '--user', 'root', '--cwd', '/usr', '--env', 'MARK=here', sandbox.sandboxId, 'cat; echo $MARK $PWD $(id -un); echo err >&2; exit 3')
    run.child.stdin.end('from standard input\n')
    await assert.rejects(run, (error) => {
      assert.deepEqual([error.code, error.stdout], [3, 'from standard input\nhere /usr root\n'])
      assert.match(error.stderr, /^err\n/)
      return true
    })
    await e2b.printed('sandbox exec', '--background', sandbox.sandboxId, 'sleep 600')
    assert.ok((await sandbox.commands.list()).some((process) => process.args.join(' ').includes('sleep 600')))
  })

  test('is a terminal for who connects', { skip: hasScript ? false : 'no script(1) here to make a terminal' }, async () => {
    const shown = await e2b.typed('echo $((6 * 7))-here\nexit\n', 'sandbox connect', sandbox.sandboxId)
    assert.match(shown, /42-here/)
    assert.equal(await sandbox.isRunning(), true)
  })

  test('is paused, resumed and killed', async (context) => {
    const missing = await e2b.lacks('sandbox pause')
    if (missing) return skip(context, missing)
    const other = await Sandbox.create(TEMPLATE, { timeoutMs: 300_000, metadata: { suite } })
    await e2b.printed('sandbox pause', other.sandboxId)
    assert.deepEqual(await listed('--state', 'paused'), [other.sandboxId])
    await e2b.printed('sandbox resume', other.sandboxId)
    assert.equal(await other.isRunning(), true)
    await e2b.printed('sandbox kill', other.sandboxId)
    assert.equal(await Sandbox.kill(other.sandboxId), false)
    assert.match((await e2b.started('sandbox kill', NOBODY)).stderr, /found/)
  })

  test('has snapshots', async (context) => {
    const missing = await e2b.lacks('sandbox snapshot')
    if (missing) return skip(context, missing)
    await e2b.printed('sandbox snapshot create', sandbox.sandboxId)
    const text = await e2b.printed('sandbox snapshot list', sandbox.sandboxId, '--format', 'json')
    const [snapshot] = JSON.parse(text)
    await e2b.printed('sandbox snapshot delete', snapshot.snapshotId ?? snapshot.snapshotID)
    assert.deepEqual(JSON.parse(await e2b.printed('sandbox snapshot list', sandbox.sandboxId, '--format', 'json')), [])
  })

  test('is created, also with a terminal', async (context) => {
    const detached = await e2b.printed('sandbox create', TEMPLATE, '--detach').catch((error) => {
      if (/unknown option/.test(error.stderr)) return ''
      throw error
    })
    if (!detached) return skip(context, 'this client has no sandbox create --detach')
    const [id] = /[0-9a-f-]{36}/.exec(detached)
    assert.equal(await Sandbox.kill(id), true)
    if (!hasScript) return
    const shown = await e2b.typed('echo $((6 * 7))-here\nexit\n', 'sandbox create', TEMPLATE)
    assert.match(shown, /42-here/)
    const made = /[0-9a-f]{8}-[0-9a-f-]{27}/.exec(shown)[0]
    await waitUntil(async () => !(await Sandbox.kill(made)), 20, 'it ends with its terminal')
  })
})
