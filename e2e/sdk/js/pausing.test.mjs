// Pausing, resuming, snapshots and forks with the official E2B JavaScript SDK.

import assert from 'node:assert/strict'
import { afterEach, describe, test } from 'node:test'

import { NotFoundError, Sandbox } from 'e2b'

import { NOBODY, TEMPLATE, everyPage, freshName, listed, waitUntil } from './support.mjs'

// Counts in its own memory, so that what is read proves that the memory went on.
const COUNT = 'n=0; while :; do n=$((n+1)); echo $n > /tmp/count.new; mv /tmp/count.new /tmp/count; sleep 0.2; done'

const made = new Set()

/** A sandbox that is killed after its test. */
async function create(template = TEMPLATE, options = {}) {
  const sandbox = await Sandbox.create(template, { timeoutMs: 300_000, ...options })
  made.add(sandbox.sandboxId)
  return sandbox
}

afterEach(async () => {
  await Promise.all([...made].map((id) => Sandbox.kill(id)))
  made.clear()
})

const count = async (sandbox) =>
  (await sandbox.files.exists('/tmp/count')) ? Number(await sandbox.files.read('/tmp/count')) : 0

async function countsOn(sandbox) {
  const before = await count(sandbox)
  await waitUntil(async () => (await count(sandbox)) > before, 20, 'it goes on counting')
}

async function startCounting(sandbox) {
  const handle = await sandbox.commands.run(COUNT, { background: true, timeoutMs: 0 })
  await handle.disconnect()
  await countsOn(sandbox)
  return handle.pid
}

const bootId = async (sandbox) => (await sandbox.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout

const waitPaused = (sandbox) =>
  waitUntil(async () => (await sandbox.getInfo()).state === 'paused', 30, 'its deadline pauses it')

describe('pauses', () => {
  test('what is paused goes on where it was', async () => {
    const metadata = { suite: freshName('tag') }
    const sandbox = await create(TEMPLATE, { metadata })
    await sandbox.files.write('/dev/shm/kept', 'in memory')
    const counter = await startCounting(sandbox)
    const boot = await bootId(sandbox)
    assert.equal(await sandbox.pause(), true)
    assert.equal(await sandbox.pause(), false)
    assert.equal(await sandbox.isRunning(), false)
    assert.equal((await sandbox.getInfo()).state, 'paused')
    assert.deepEqual((await listed({ metadata, state: ['paused'] })).map((info) => info.sandboxId), [sandbox.sandboxId])
    assert.deepEqual(await listed({ metadata, state: ['running'] }), [])
    const again = await Sandbox.connect(sandbox.sandboxId)
    assert.equal(again.sandboxId, sandbox.sandboxId)
    assert.equal(await again.isRunning(), true)
    assert.equal(await sandbox.files.read('/dev/shm/kept'), 'in memory')
    assert.ok((await again.commands.list()).some((process) => process.pid === counter))
    await countsOn(again)
    assert.equal(await bootId(again), boot)
  })

  test('a pause of the files alone boots', async () => {
    const sandbox = await create()
    const boot = await bootId(sandbox)
    await sandbox.files.write('/home/user/kept', 'on disk')
    assert.equal(await sandbox.pause({ keepMemory: false }), true)
    await sandbox.connect()
    assert.equal(await sandbox.files.read('/home/user/kept'), 'on disk')
    assert.notEqual(await bootId(sandbox), boot)
  })

  test('connect can leave the memory and boot', async () => {
    const sandbox = await create()
    const boot = await bootId(sandbox)
    assert.equal(await sandbox.pause(), true)
    await sandbox.connect({ onResume: 'reboot' })
    assert.notEqual(await bootId(sandbox), boot)
  })

  test('a deadline pauses and a command resumes', async () => {
    const sandbox = await create(TEMPLATE, { lifecycle: { onTimeout: 'pause', autoResume: true } })
    assert.deepEqual((await sandbox.getInfo()).lifecycle, { onTimeout: 'pause', autoResume: true })
    await startCounting(sandbox)
    await sandbox.setTimeout(0)
    await waitPaused(sandbox)
    assert.equal((await sandbox.commands.run('echo awake')).stdout, 'awake\n')
    assert.equal((await sandbox.getInfo()).state, 'running')
    await countsOn(sandbox)
  })

  test('a paused sandbox can be killed', async () => {
    const sandbox = await create()
    assert.equal(await sandbox.pause(), true)
    assert.equal(await sandbox.kill(), true)
    assert.equal(await sandbox.kill(), false)
    await assert.rejects(sandbox.connect(), NotFoundError)
    await assert.rejects(sandbox.pause(), NotFoundError)
  })

  test('pausing nobody is not found', async () => {
    await assert.rejects(Sandbox.pause(NOBODY), NotFoundError)
  })
})

describe('snapshots', () => {
  test('a snapshot starts sandboxes, outlives its own, and is deleted once', async () => {
    const source = await create()
    await source.files.write('/home/user/kept', 'before')
    await startCounting(source)
    const name = freshName('prepared')
    const snapshot = await source.createSnapshot({ name })
    assert.ok(snapshot.names.some((full) => full.includes(name)), String(snapshot.names))
    await source.files.write('/home/user/kept', 'after')
    await countsOn(source)
    assert.equal(await source.kill(), true)
    const ids = async () =>
      (await everyPage(Sandbox.listSnapshots({ sandboxId: source.sandboxId }))).map((info) => info.snapshotId)
    assert.deepEqual(await ids(), [snapshot.snapshotId])
    for (const template of [snapshot.snapshotId, name]) {
      const sandbox = await create(template)
      assert.equal(await sandbox.files.read('/home/user/kept'), 'before')
      await countsOn(sandbox)
    }
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
    assert.deepEqual(await ids(), [])
  })

  test('snapshots are listed page by page, the newest first', async () => {
    const sandbox = await create()
    const taken = []
    for (let n = 0; n < 3; n++) taken.unshift((await sandbox.createSnapshot()).snapshotId)
    try {
      const found = await everyPage(sandbox.listSnapshots({ limit: 2 }))
      assert.deepEqual(found.map((info) => info.snapshotId), taken)
    } finally {
      for (const id of taken) assert.equal(await Sandbox.deleteSnapshot(id), true)
    }
  })
})

describe('forks', () => {
  test('forks are alike and apart', async () => {
    const source = await create()
    await source.files.write('/home/user/kept', 'shared')
    await startCounting(source)
    const children = await source.fork({ count: 2, timeoutMs: 120_000 })
    for (const child of children) {
      assert.ok(child instanceof Sandbox, String(child))
      made.add(child.sandboxId)
    }
    assert.equal(new Set([source, ...children].map((sandbox) => sandbox.sandboxId)).size, 3)
    for (const child of children) {
      assert.equal(await child.files.read('/home/user/kept'), 'shared')
      await child.files.write('/home/user/kept', 'own')
      await countsOn(child)
    }
    assert.equal(await source.files.read('/home/user/kept'), 'shared')
    await countsOn(source)
  })
})
