// What is told of a sandbox, to the official E2B JavaScript SDK and command-line client.

import assert from 'node:assert/strict'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, describe, test } from 'node:test'

import { NotFoundError, Sandbox } from 'e2b'

import { client, objects } from './cli.mjs'
import { NOBODY, TEMPLATE, waitUntil } from './support.mjs'

describe('a sandbox that runs', () => {
  let sandbox, home, e2b

  before(async () => {
    home = await mkdtemp(join(tmpdir(), 'aenv-e2b-'))
    e2b = client(home)
    sandbox = await Sandbox.create(TEMPLATE, { timeoutMs: 600_000 })
    await waitUntil(async () => (await sandbox.getMetrics()).length > 0, 30, 'a first sample')
  })
  after(async () => {
    await sandbox?.kill()
    await rm(home, { recursive: true, force: true })
  })

  test('has metrics', async () => {
    const metric = (await sandbox.getMetrics()).at(-1)
    assert.ok(metric.cpuCount > 0 && metric.cpuUsedPct >= 0 && metric.cpuUsedPct <= 100)
    assert.ok(metric.memUsed > 0 && metric.memUsed < metric.memTotal)
    assert.ok(metric.diskUsed > 0 && metric.diskUsed <= metric.diskTotal)
    assert.ok(Math.abs(Date.now() - metric.timestamp.getTime()) < 60_000)
    const hour = 3_600_000
    const old = { start: new Date(Date.now() - 2 * hour), end: new Date(Date.now() - hour) }
    assert.deepEqual(await sandbox.getMetrics(old), [])
    await assert.rejects(Sandbox.getMetrics(NOBODY), NotFoundError)
  })

  test('shows its metrics on the command line', async () => {
    const [metric] = objects(await e2b.printed('sandbox metrics', sandbox.sandboxId, '--format', 'json'))
    assert.ok(metric.memTotal > 0 && metric.timestamp)
    assert.match(await e2b.printed('sandbox metrics', sandbox.sandboxId), /CPU.*Memory.*Disk/)
  })

  test('shows its life on the command line', async () => {
    const entries = objects(await e2b.printed('sandbox logs', sandbox.sandboxId, '--format', 'json'))
    const created = entries.find((entry) => entry.message === 'created')
    assert.deepEqual([created.logger, created.template], ['sandbox', TEMPLATE])
    assert.match(await e2b.printed('sandbox logs', sandbox.sandboxId), /created/)
    assert.deepEqual(objects(await e2b.printed('sandbox logs', sandbox.sandboxId, '--format', 'json', '--level', 'ERROR')), [])
  })

  test('is followed to its end on the command line', async () => {
    const doomed = await Sandbox.create(TEMPLATE, { timeoutMs: 120_000 })
    const following = e2b.started('sandbox logs', doomed.sandboxId, '--follow', '--format', 'json')
    let told = ''
    following.child.stdout.on('data', (text) => { told += text })
    const messages = () => objects(told.slice(0, told.lastIndexOf('\n') + 1)).map((entry) => entry.message)
    const tells = (message) => waitUntil(() => messages().includes(message), 30, message)
    await tells('created')
    const { snapshotId } = await doomed.createSnapshot()
    await tells('snapshot taken')
    // It looks at the logs and then whether the sandbox runs: the pause, if it comes between the two, is not told any more.
    await doomed.pause()
    await following
    assert.equal(new Set(messages()).size, messages().length, 'nothing is told twice')
    await doomed.kill()
    await Sandbox.deleteSnapshot(snapshotId)
  })
})
