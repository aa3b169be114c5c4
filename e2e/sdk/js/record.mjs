// Loaded before a test file (`node --import`): notes which public calls of the SDK each test makes, and what became of it.
//
// The SDK stays as it is but for a note at the beginning of each public function. AENV_CALLS names the folder for notes.

import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { afterEach } from 'node:test'

import * as e2b from 'e2b'

import { LABELS, surface } from './surface.mjs'

const { calls } = surface()
const outcomes = {}
const noted = new WeakSet()
let made = new Set()

/** Notes calls of `original`, and looks at what they give for objects of classes that are not exported. */
function note(holder, name, original, call) {
  if (noted.has(original)) return
  const noting = function (...args) {
    made.add(call)
    const result = original.apply(this, args)
    if (result instanceof Promise) result.then(meet, () => {})
    else meet(result)
    return result
  }
  noted.add(noting)
  Object.defineProperty(holder, name, { value: noting, writable: true, configurable: true })
}

function noteAll(holder, label) {
  for (let at = holder; at && at !== Object.prototype && at !== Function.prototype; at = Object.getPrototypeOf(at)) {
    for (const name of Object.getOwnPropertyNames(at)) {
      // Not read as a property: `Template` keeps what was read for later.
      const { value } = Object.getOwnPropertyDescriptor(at, name)
      const call = `${label}.${name}`
      if (typeof value === 'function' && calls.has(call)) note(at, name, value, call)
    }
  }
}

function meet(value) {
  if (Array.isArray(value)) return value.forEach(meet)
  if (value === null || typeof value !== 'object') return
  const label = labelOf(value)
  if (!label) return
  noteAll(Object.getPrototypeOf(value), label)
  for (const part of ['commands', 'files', 'pty', 'git']) {
    if (label === 'Sandbox' && value[part]) noteAll(Object.getPrototypeOf(value[part]), `Sandbox.${part}`)
  }
}

function labelOf(value) {
  for (let at = Object.getPrototypeOf(value); at; at = Object.getPrototypeOf(at)) {
    // Bundlers put an underscore before names of classes.
    const label = LABELS[at.constructor?.name.replace(/^_/, '')]
    if (label) return label
  }
}

for (const [holder, label] of [
  [e2b.Sandbox, 'Sandbox'],
  [e2b.Sandbox.prototype, 'Sandbox'],
  [e2b.Template, 'Template'],
  [e2b.TemplateBase, 'Template'],
  [e2b.TemplateBase.prototype, 'Template'],
  [e2b.ReadyCmd.prototype, 'ReadyCmd'],
]) {
  noteAll(holder, label)
}

/** For calls that are not the SDK's. */
export const noteCall = (call) => made.add(call)

function settle(outcome) {
  for (const call of made) {
    outcomes[call] ??= { passed: 0, failed: 0, skipped: 0 }
    outcomes[call][outcome]++
  }
  made = new Set()
}

/** Gives a test up that has begun: `return skip(context, why)`. Node runs nothing after a test that was skipped. */
export function skip(context, why) {
  settle('skipped')
  context.skip(why)
}

afterEach((context) => settle(context.error || context.passed === false ? 'failed' : 'passed'))

process.on('exit', () => {
  if (process.env.AENV_CALLS) writeFileSync(join(process.env.AENV_CALLS, `${process.pid}.json`), JSON.stringify(outcomes))
})
