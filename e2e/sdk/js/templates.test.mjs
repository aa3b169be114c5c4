// Templates that the SDK's builder describes, with the official E2B JavaScript SDK.

import assert from 'node:assert/strict'
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, test } from 'node:test'

import { BuildError, Sandbox, Template, waitForFile } from 'e2b'

import { TEMPLATE, freshName } from './support.mjs'

async function build(template, name, options = {}) {
  const logs = []
  const built = await Template.build(template, name, { ...options, onBuildLogs: (entry) => logs.push(entry.message) })
  return { built, logs }
}

describe('a template with steps', () => {
  const name = freshName('built')
  let folder, first

  const recipe = () =>
    Template({ fileContextPath: folder })
      .fromTemplate(TEMPLATE)
      .setEnvs({ GREETING: 'hello', TWICE: '${GREETING}-${GREETING}' })
      .runCmd('echo $TWICE > said')
      .copy('app', '/srv/app', { user: 'root', mode: 0o755 })
      .copy('*.txt', 'texts/')
      .setUser('worker')
      .setWorkdir('/srv/work')
      .runCmd(['pwd > where', 'id -un >> where'])
      .setStartCmd('echo "$GREETING $(id -un)" > /tmp/up; sleep 3600', waitForFile('/tmp/up'))

  before(async () => {
    folder = mkdtempSync(join(tmpdir(), 'aenv-suite-'))
    mkdirSync(join(folder, 'app/lib'), { recursive: true })
    writeFileSync(join(folder, 'app/lib/part.txt'), 'part')
    writeFileSync(join(folder, 'one.txt'), 'one')
    writeFileSync(join(folder, 'two.txt'), 'two')
    first = await build(recipe(), name, { tags: ['v1', 'default'] })
  })
  after(async () => {
    rmSync(folder, { recursive: true })
    if (first) await Sandbox.deleteSnapshot(first.built.templateId)
  })

  test('steps have made what they say', async () => {
    const sandbox = await Sandbox.create(`${name}:v1`, { timeoutMs: 120_000 })
    try {
      const run = async (command, user) => (await sandbox.commands.run(command, { user })).stdout
      assert.equal(await run('cat /home/user/said', 'root'), 'hello-hello\n')
      assert.equal(await run('echo [$GREETING]'), '[]\n')
      assert.equal(await run("stat -c '%U %a' /srv/app/lib/part.txt"), 'root 755\n')
      assert.equal(await run('ls /home/user/texts', 'root'), 'one.txt\ntwo.txt\n')
      assert.equal(await run('cat where; pwd; id -un'), '/srv/work\nworker\n/srv/work\nworker\n')
      assert.equal(await run('cat /tmp/up'), 'hello worker\n')
      assert.equal((await sandbox.commands.list()).some((process) => process.args.join(' ').includes('sleep 3600')), true)
    } finally {
      await sandbox.kill()
    }
  })

  test('what was done is not done again, and gets a build of its own', async () => {
    const { built, logs } = await build(recipe(), name)
    assert.equal(built.templateId, first.built.templateId)
    assert.notEqual(built.buildId, first.built.buildId)
    assert.equal(logs.filter((line) => line.startsWith('CACHED')).length, 7)
    const tags = Object.fromEntries((await Template.getTags(name)).map((tag) => [tag.tag, tag.buildId]))
    assert.deepEqual(tags, { v1: first.built.buildId, default: built.buildId })
    assert.equal((await Template.assignTags(name, ['v2'])).buildId, built.buildId)
    await Template.removeTags(name, ['v1'])
    assert.deepEqual([await Template.exists(`${name}:v1`), await Template.exists(`${name}:v2`)], [false, true])
  })
})

test('a step that fails ends the build', async () => {
  const template = Template().fromTemplate(TEMPLATE).runCmd('exit 3')
  const name = freshName('failing')
  await assert.rejects(Template.build(template, name), (error) => {
    assert.ok(error instanceof BuildError)
    assert.equal(error.message, "failed to run command 'exit 3': exit status 3")
    return true
  })
  const { templateId } = await Template.buildInBackground(template, name)
  assert.equal(await Sandbox.deleteSnapshot(templateId), true)
  assert.equal(await Template.exists(name), false)
})
