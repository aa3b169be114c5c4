// What the test files share.

import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'

import { Sandbox } from 'e2b'

export const TEMPLATE = process.env.AENV_TEMPLATE ?? 'base'
export const NOBODY = randomUUID()

export const freshName = (prefix) => `${prefix}-${randomUUID().slice(0, 8)}`

/** All that a list has. */
export async function everyPage(paginator) {
  const found = []
  while (paginator.hasNext) found.push(...(await paginator.nextItems()))
  return found
}

/** The sandboxes that a query finds. */
export const listed = (query) => everyPage(Sandbox.list({ query }))

/** Polls until the condition holds; fails with what was waited for. */
export async function waitUntil(condition, seconds, what) {
  const deadline = Date.now() + seconds * 1000
  while (!(await condition())) {
    if (Date.now() > deadline) assert.fail(`not within ${seconds} s: ${what}`)
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
}
