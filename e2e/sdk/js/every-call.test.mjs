// Every call of the SDK at least once; what is refused is the error that the SDK has for it.

import assert from 'node:assert/strict'
import { chmodSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, test } from 'node:test'

import * as e2b from 'e2b'
import {
  AuthenticationError,
  BuildError,
  CommandExitError,
  FileNotFoundError,
  GitUpstreamError,
  InvalidArgumentError,
  NotFoundError,
  Sandbox,
  SandboxError,
  Template,
  TemplateError,
  TimeoutError,
  defaultBuildLogger,
  getSignature,
  waitForFile,
  waitForPort,
  waitForProcess,
  waitForTimeout,
  waitForURL,
} from 'e2b'

import { NOBODY, TEMPLATE, everyPage, freshName, listed, waitUntil } from './support.mjs'

const GIT_PACKAGES = process.env.AENV_GIT_PACKAGES

describe('with one sandbox', () => {
  let sandbox, dir

  before(async () => {
    sandbox = await Sandbox.create(TEMPLATE, { timeoutMs: 600_000 })
    dir = `/home/user/${freshName('every')}`
    await sandbox.files.makeDir(dir)
  })
  after(() => sandbox?.kill())

  describe('files', () => {
    test('what is written in any form is read in any', async () => {
      const path = `${dir}/data`
      const data = Uint8Array.from({ length: 100_000 }, (_, n) => n & 0xff)
      const forms = {
        bytes: [data.buffer, {}],
        'a blob': [new Blob([data]), {}],
        'a stream': [new Blob([data]).stream(), {}],
        compressed: [data.buffer, { gzip: true }],
        'as it is': [data.buffer, { useOctetStream: true }],
      }
      for (const [form, [content, options]] of Object.entries(forms)) {
        assert.equal((await sandbox.files.write(path, content, options)).path, path)
        assert.deepEqual(await sandbox.files.read(path, { format: 'bytes' }), data, form)
      }
      assert.equal((await sandbox.files.read(path, { format: 'blob' })).size, data.length)
      const stream = await sandbox.files.read(path, { format: 'stream' })
      assert.equal((await new Response(stream).arrayBuffer()).byteLength, data.length)
      await sandbox.files.write(path, '')
      assert.equal(await sandbox.files.read(path), '')
    })

    test('several files and their metadata', async () => {
      const metadata = { 'made-by': 'suite' }
      const written = await sandbox.files.writeFiles([{ path: `${dir}/a`, data: 'a' }, { path: `${dir}/b`, data: 'b' }], { metadata })
      assert.deepEqual(written.map((info) => [info.name, info.metadata]), [['a', metadata], ['b', metadata]])
      const info = await sandbox.files.getInfo(`${dir}/a`)
      assert.deepEqual([info.size, info.permissions, info.owner, info.metadata], [1, '-rw-r--r--', 'user', metadata])
    })

    test('what happens in a folder is watched', async () => {
      const events = []
      let exited = false
      const options = { recursive: true, includeEntry: true, onExit: () => { exited = true } }
      const watch = await sandbox.files.watchDir(dir, (event) => { events.push(event) }, options)
      const seen = (type, name) => waitUntil(() => events.some((event) => event.type === type && event.name === name), 10, `${type} ${name}`)
      await sandbox.files.write(`${dir}/seen`, 'x')
      await seen('write', 'seen')
      await sandbox.files.rename(`${dir}/seen`, `${dir}/moved`)
      await sandbox.files.remove(`${dir}/moved`)
      await seen('remove', 'moved')
      assert.deepEqual(events.filter((event) => event.name === 'seen').map((event) => event.type), ['create', 'chmod', 'write', 'rename'])
      assert.equal(events.find((event) => event.type === 'write').entry.path, `${dir}/seen`)
      await watch.stop()
      await waitUntil(() => exited, 10, 'the end of the watch is told')
    })

    test('folders', async () => {
      assert.equal(await sandbox.files.makeDir(`${dir}/sub/deep`), true)
      assert.equal(await sandbox.files.makeDir(`${dir}/sub/deep`), false)
      assert.deepEqual((await sandbox.files.list(`${dir}/sub`, { depth: 2 })).map((entry) => entry.name), ['deep'])
      assert.equal(await sandbox.files.exists(`${dir}/sub/deep`), true)
      await sandbox.files.remove(`${dir}/sub`)
      assert.equal(await sandbox.files.exists(`${dir}/sub`), false)
    })

    test('what is not there, or makes no sense', async () => {
      const missing = `${dir}/missing`
      await assert.rejects(sandbox.files.read(missing), FileNotFoundError)
      await assert.rejects(sandbox.files.list(missing), FileNotFoundError)
      await assert.rejects(sandbox.files.getInfo(missing), FileNotFoundError)
      await assert.rejects(sandbox.files.rename(missing, `${dir}/other`), FileNotFoundError)
      await assert.rejects(sandbox.files.watchDir(missing, () => {}), FileNotFoundError)
      await assert.rejects(sandbox.files.read(dir), InvalidArgumentError)
      await assert.rejects(sandbox.files.write(dir, 'a folder'), InvalidArgumentError)
      await assert.rejects(sandbox.files.list(dir, { depth: 0 }), InvalidArgumentError)
      await assert.rejects(sandbox.files.read(dir, { user: 'nobody-knows' }), AuthenticationError)
    })

    test('links to files are signed', async () => {
      const headers = { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '49983' }
      const upload = await sandbox.uploadUrl(`${dir}/linked`)
      const body = { method: 'POST', body: 'through a link', headers: { ...headers, 'Content-Type': 'application/octet-stream' } }
      assert.equal((await fetch(upload, body)).status, 200)
      const link = await sandbox.downloadUrl(`${dir}/linked`, { useSignatureExpiration: 300 })
      assert.equal(await (await fetch(link, { headers })).text(), 'through a link')
      const wrong = new URL(link)
      wrong.searchParams.set('signature', (await getSignature({ path: '/x', operation: 'read', envdAccessToken: 'no' })).signature)
      assert.equal((await fetch(wrong, { headers })).status, 401)
    })
  })

  describe('commands', () => {
    test('input through the handle and by pid', async () => {
      const handle = await sandbox.commands.run('cat', { background: true, stdin: true })
      await handle.sendStdin('by handle\n')
      await sandbox.commands.sendStdin(handle.pid, 'by pid\n')
      await handle.closeStdin()
      assert.equal((await handle.wait()).stdout, 'by handle\nby pid\n')
      const other = await sandbox.commands.run('cat', { background: true, stdin: true })
      await sandbox.commands.closeStdin(other.pid)
      assert.equal((await other.wait()).exitCode, 0)
    })

    test('what runs is connected to and killed', async () => {
      const handle = await sandbox.commands.run('sleep 600', { background: true })
      const again = await sandbox.commands.connect(handle.pid)
      await handle.disconnect()
      assert.ok((await sandbox.commands.list()).some((process) => process.pid === handle.pid))
      assert.equal(await again.kill(), true)
      await assert.rejects(again.wait(), CommandExitError)
      assert.equal(await sandbox.commands.kill(handle.pid), false)
    })

    test('what is refused is an error of its kind', async () => {
      await assert.rejects(sandbox.commands.run('sleep 60', { timeoutMs: 500 }), TimeoutError)
      await assert.rejects(sandbox.commands.run('true', { cwd: '/no/such/folder' }), InvalidArgumentError)
      await assert.rejects(sandbox.commands.run('true', { user: 'nobody-knows' }), AuthenticationError)
      await assert.rejects(sandbox.commands.connect(999_999), NotFoundError)
      await assert.rejects(sandbox.commands.sendStdin(999_999, 'x'), NotFoundError)
      await assert.rejects(sandbox.commands.closeStdin(999_999), NotFoundError)
    })
  })

  describe('terminals', () => {
    const text = (line) => new TextEncoder().encode(line)

    test('a terminal has a size and takes input', async () => {
      let seen = ''
      const onData = (data) => { seen += new TextDecoder().decode(data) }
      const options = { cols: 77, rows: 20, onData, envs: { MARK: 'here' }, cwd: '/usr', user: 'root', timeoutMs: 60_000 }
      const terminal = await sandbox.pty.create(options)
      await sandbox.pty.sendInput(terminal.pid, text('echo $MARK $PWD $(id -un) $TERM\n'))
      await sandbox.pty.resize(terminal.pid, { cols: 99, rows: 30 })
      await sandbox.pty.sendInput(terminal.pid, text('stty size; exit 5\n'))
      await assert.rejects(terminal.wait(), (error) => error instanceof CommandExitError && error.exitCode === 5)
      assert.match(seen, /here \/usr root xterm-256color/)
      assert.match(seen, /30 99/)
    })

    test('a terminal is connected to and killed', async () => {
      const onData = () => {}
      const terminal = await sandbox.pty.create({ cols: 80, rows: 20, onData })
      const again = await sandbox.pty.connect(terminal.pid, { onData })
      assert.equal(await sandbox.pty.kill(terminal.pid), true)
      await assert.rejects(again.wait(), CommandExitError)
      await assert.rejects(sandbox.pty.connect(999_999, { onData }), NotFoundError)
      await assert.rejects(sandbox.pty.resize(999_999, { cols: 1, rows: 1 }), NotFoundError)
      assert.equal(await sandbox.pty.kill(999_999), false)
    })
  })

  test('hosts, and the token of a gateway', async () => {
    assert.ok(sandbox.getHost(3000).startsWith(`3000-${sandbox.sandboxId}.`))
    assert.equal(sandbox.getMcpUrl(), `https://${sandbox.getHost(50005)}/mcp`)
    await sandbox.files.write('/etc/mcp-gateway/.token', 'secret', { user: 'root' })
    assert.equal(await sandbox.getMcpToken(), 'secret')
  })

  test('rules for outgoing traffic are replaced', async () => {
    await sandbox.updateNetwork({ denyOut: ['0.0.0.0/0'] })
    await sandbox.updateNetwork({})
    await assert.rejects(Sandbox.updateNetwork(NOBODY, {}), NotFoundError)
  })
})

describe('life', () => {
  test('a whole life', async () => {
    const metadata = { suite: freshName('life') }
    const sandbox = await Sandbox.create(TEMPLATE, { timeoutMs: 300_000, metadata })
    try {
      assert.equal(await sandbox.isRunning(), true)
      const info = await sandbox.getInfo()
      // Still there, under its old name.
      assert.deepEqual((await Sandbox.getFullInfo?.(sandbox.sandboxId))?.startedAt ?? info.startedAt, info.startedAt)
      assert.deepEqual((await listed({ metadata })).map((found) => found.sandboxId), [sandbox.sandboxId])
      await sandbox.setTimeout(900_000)
      assert.ok((await sandbox.getInfo()).endAt > info.endAt)
      await waitUntil(async () => (await sandbox.getMetrics()).length > 0, 30, 'a first sample')
      const snapshot = await sandbox.createSnapshot({ name: freshName('every') })
      assert.deepEqual((await everyPage(sandbox.listSnapshots({ limit: 1 }))).map((found) => found.snapshotId), [snapshot.snapshotId])
      const [child] = await sandbox.fork({ timeoutMs: 60_000 })
      assert.equal(await child.kill(), true)
      assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
      assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
      assert.equal(await sandbox.pause(), true)
      await sandbox.connect({ timeoutMs: 120_000 })
      assert.equal(await sandbox.betaPause(), true)
    } finally {
      assert.equal(await sandbox.kill(), true)
    }
    assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
  })

  test('nobody is not found', async () => {
    for (const name of ['getInfo', 'connect', 'getMetrics', 'pause', 'createSnapshot', 'fork']) {
      await assert.rejects(Sandbox[name](NOBODY), NotFoundError, name)
    }
    await assert.rejects(Sandbox.setTimeout(NOBODY, 1000), NotFoundError)
    assert.equal(await Sandbox.deleteSnapshot(NOBODY), false)
  })

  test('what runs in a killed sandbox ends with it', async () => {
    const sandbox = await Sandbox.create(TEMPLATE, { timeoutMs: 120_000 })
    const handle = await sandbox.commands.run('sleep 600', { background: true })
    const ended = assert.rejects(handle.wait(), TimeoutError)
    await sandbox.kill()
    await ended
    await assert.rejects(sandbox.commands.run('true'), SandboxError)
  })

  test('a client has settings of its own', { skip: e2b.E2B ? false : 'this SDK has no E2B' }, async () => {
    const wrong = new e2b.E2B({ apiKey: `e2b_${'0'.repeat(40)}` })
    await assert.rejects(wrong.Sandbox.getInfo(NOBODY), AuthenticationError)
    const right = new e2b.E2B({ apiKey: process.env.E2B_API_KEY })
    await assert.rejects(right.Sandbox.getInfo(NOBODY), NotFoundError)
  })
})

describe('templates', () => {
  const start = async (template) => JSON.parse(await Template.toJSON(template))

  test('images of registries are named', async () => {
    for (const [template, image] of [
      [Template().fromAlpineImage(), 'alpine:'],
      [Template().fromArchImage(), 'archlinux:'],
      [Template().fromBaseImage(), 'e2bdev/base'],
      [Template().fromBunImage(), 'oven/bun:'],
      [Template().fromDebianImage('bookworm'), 'debian:bookworm'],
      [Template().fromFedoraImage(), 'fedora:'],
      [Template().fromNodeImage('22'), 'node:22'],
      [Template().fromPythonImage('3.11'), 'python:3.11'],
      [Template().fromUbuntuImage('24.04'), 'ubuntu:24.04'],
      [Template().fromImage('registry.test/x:1'), 'registry.test/x:1'],
    ]) {
      assert.ok((await start(template)).fromImage.includes(image), image)
    }
    const credentials = { accessKeyId: 'id', secretAccessKey: 'secret', region: 'eu-west-1' }
    const aws = await start(Template().fromAWSRegistry('1.dkr.ecr.eu-west-1.amazonaws.com/x', credentials))
    assert.equal(aws.fromImageRegistry.type, 'aws')
    const gcp = await start(Template().fromGCPRegistry('gcr.io/x', { serviceAccountJSON: { project_id: 'p' } }))
    assert.equal(gcp.fromImageRegistry.type, 'gcp')
  })

  test('other beginnings', async () => {
    const gateway = await start(Template().fromTemplate('mcp-gateway').addMcpServer(['exa']))
    assert.match(gateway.steps[0].args[0], /mcp-gateway pull exa/)
    const container = Template().fromTemplate('devcontainer').betaDevContainerPrebuild('/c')
    assert.match((await start(container)).steps[0].args[0], /devcontainer build/)
    assert.match((await start(container.betaSetDevContainerStart('/c'))).startCmd, /devcontainer up/)
    const recipe = Template().fromDockerfile('FROM debian:bookworm\nRUN echo hi\n')
    assert.match(Template.toDockerfile(recipe), /RUN echo hi/)
  })

  test('ready commands', () => {
    for (const [ready, command] of [
      [waitForFile('/up'), '[ -f /up ]'],
      [waitForPort(80), '80'],
      [waitForProcess('init'), 'pgrep'],
      [waitForTimeout(3000), 'sleep 3'],
      [waitForURL('http://localhost/'), 'http://localhost/'],
    ]) {
      assert.ok(ready.getCmd().includes(command), ready.getCmd())
    }
  })

  test('every step of a build', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'aenv-suite-'))
    const name = freshName('every')
    mkdirSync(join(folder, 'installers'))
    for (const program of ['apt-get', 'bun', 'git', 'npm', 'pip']) {
      const at = join(folder, 'installers', program)
      writeFileSync(at, '#!/bin/sh\numask 0\necho "$(id -un) $(basename "$0") $*" >> /code/calls\n')
      chmodSync(at, 0o755)
    }
    for (const file of ['one', 'two']) writeFileSync(join(folder, `${file}.txt`), file)
    const template = Template({ fileContextPath: folder })
      .fromTemplate(TEMPLATE)
      .copy('installers', '/usr/local/bin', { user: 'root', mode: 0o755 })
      .aptInstall(['jq', 'tree'])
      .pipInstall('numpy')
      .npmInstall('left-pad', { g: true })
      .bunInstall('left-pad')
      .gitClone('https://git.test/x.git', '/tmp/x', { branch: 'main' })
      .copyItems([{ src: 'one.txt', dest: 'items/' }, { src: 'two.txt', dest: 'items/' }])
      .makeDir('made/deep', { mode: 0o700 })
      .rename('items/one.txt', 'made/renamed')
      .remove('items/two.txt')
      .makeSymlink('made/renamed', 'link')
      .skipCache()
      .setEnvs({ GREETING: 'hello' })
      .setWorkdir('made')
      .runCmd(['echo $GREETING > said', 'pwd >> said'])
      .setUser('root')
      .runCmd('id -un > /tmp/who')
      .setUser('user')
      .setReadyCmd(waitForFile('/tmp/who'))
    const onBuildLogs = defaultBuildLogger()
    const built = await Template.build(template, `${name}:v1`, { tags: ['stable'], cpuCount: 1, memoryMB: 512, onBuildLogs })
    try {
      const sandbox = await Sandbox.create(`${name}:v1`, { timeoutMs: 120_000 })
      try {
        const { stdout } = await sandbox.commands.run('cat link made/said /tmp/who; stat -c %a made/deep; ls items', { cwd: '/home/user' })
        assert.equal(stdout, 'onehello\n/home/user/made\nroot\n700\n')
        const calls = (await sandbox.commands.run('cat /code/calls')).stdout
        for (const call of ['root apt-get install -y jq tree', 'root pip install numpy', 'root npm install -g left-pad', 'user bun install', 'user git clone']) {
          assert.ok(calls.includes(call), calls)
        }
      } finally {
        await sandbox.kill()
      }
      assert.equal(await Template.exists(`${name}:v1`), true)
      assert.equal(await Template.aliasExists(`${name}:stable`), true)
      assert.equal((await Template.assignTags(`${name}:v1`, ['v2'])).buildId, built.buildId)
      await Template.removeTags(name, ['stable'])
      assert.deepEqual((await Template.getTags(name)).map((tag) => tag.tag).sort(), ['v1', 'v2'])
    } finally {
      await Sandbox.deleteSnapshot(built.templateId)
      rmSync(folder, { recursive: true })
    }
    await assert.rejects(Template.getTags(name), TemplateError)
    await assert.rejects(Template.assignTags(name, ['x']), TemplateError)
    await assert.rejects(Template.removeTags(name, ['x']), TemplateError)
  })

  test('a build in the background is asked about', async () => {
    const template = Template().fromTemplate(TEMPLATE).runCmd('exit 4')
    const build = await Template.buildInBackground(template, freshName('failing'))
    let status
    do status = await Template.getBuildStatus(build)
    while (['waiting', 'building'].includes(status.status))
    assert.deepEqual([status.status, status.reason.step], ['error', '1'])
    await Sandbox.deleteSnapshot(build.templateId)
    await assert.rejects(Template.getBuildStatus(build), BuildError)
  })
})

describe('git', { skip: GIT_PACKAGES ? false : 'AENV_GIT_PACKAGES names no folder with git’s packages' }, () => {
  const [here, bare] = ['/home/user/work', '/home/user/bare.git']
  let sandbox, built

  before(async () => {
    const recipe = Template({ fileContextPath: GIT_PACKAGES })
      .fromTemplate(TEMPLATE)
      .copy('*.deb', '/tmp/debs/', { user: 'root' })
      .runCmd('for deb in /tmp/debs/*; do dpkg-deb -x $deb /; done', { user: 'root' })
    const name = freshName('git')
    built = await Template.build(recipe, name)
    sandbox = await Sandbox.create(name, { timeoutMs: 300_000 })
  })
  after(async () => {
    await sandbox?.kill()
    if (built) await Sandbox.deleteSnapshot(built.templateId)
  })

  test('a repository from init to pull', async () => {
    const { git, files } = sandbox
    const write = (text) => files.write(`${here}/file`, text)
    await git.init(bare, { bare: true, initialBranch: 'main' })
    await git.init(here, { initialBranch: 'main' })
    await git.configureUser('Some One', 'some@one.test')
    await git.setConfig('core.abbrev', '12', { scope: 'local', path: here })
    assert.equal(await git.getConfig('core.abbrev', { scope: 'local', path: here }), '12')
    await write('one\n')
    assert.equal((await git.status(here)).hasUntracked, true)
    await git.add(here)
    await git.commit(here, 'First')
    assert.equal((await git.status(here)).isClean, true)
    await git.createBranch(here, 'side')
    assert.equal((await git.branches(here)).currentBranch, 'side')
    await git.checkoutBranch(here, 'main')
    await git.deleteBranch(here, 'side')
    await write('two\n')
    await git.restore(here, { paths: ['file'] })
    await write('three\n')
    await git.add(here)
    await git.reset(here, { mode: 'hard' })
    assert.equal(await files.read(`${here}/file`), 'one\n')
    await git.remoteAdd(here, 'origin', bare)
    assert.equal(await git.remoteGet(here, 'origin'), bare)
    await assert.rejects(git.pull(here), GitUpstreamError)
    await git.push(here, { remote: 'origin', branch: 'main' })
    await git.clone(bare, { path: '/home/user/clone', branch: 'main' })
    await write('four\n')
    await sandbox.commands.run('git commit -qam Second && git push -q', { cwd: here })
    await git.pull('/home/user/clone')
    assert.equal(await files.read('/home/user/clone/file'), 'four\n')
    await git.dangerouslyAuthenticate({ username: 'me', password: 'secret', host: 'git.test' })
    assert.match(await files.read('/home/user/.git-credentials'), /me:secret@git.test/)
  })
})
