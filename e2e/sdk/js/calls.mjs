// `node calls.mjs PART FOLDER FILE`: what became of each public call, from the notes of all test files; fails if one was not
// made. PART is `sdk`, or `interpreter` for the calls that the code interpreter adds.

import { readFileSync, readdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'

import { EXCLUDED, INTERPRETER, declared, ofInterpreter, surface, version } from './surface.mjs'

const [part, folder, file] = process.argv.slice(2)
const isInterpreters = (call) => call.startsWith(ofInterpreter(''))

const { calls, unknown } = part === 'sdk' ? surface() : { calls: new Set(), unknown: [] }
if (part === 'interpreter') {
  for (const name of INTERPRETER) calls.add(ofInterpreter(name))
  const { Sandbox } = declared('@e2b/code-interpreter')
  unknown.push(...[...Sandbox].filter((name) => !INTERPRETER.includes(name)))
}
const found = Object.fromEntries([...calls].sort().map((call) => [call, {}]))
for (const notes of readdirSync(folder)) {
  for (const [call, outcomes] of Object.entries(JSON.parse(readFileSync(join(folder, notes), 'utf8')))) {
    if ((part === 'interpreter') !== isInterpreters(call)) continue
    for (const [outcome, count] of Object.entries(outcomes)) {
      found[call] ??= {}
      found[call][outcome] = (found[call][outcome] ?? 0) + count
    }
  }
}
const excluded = Object.fromEntries(part === 'sdk' ? Object.entries(EXCLUDED).map(([name, why]) => [`${name}.*`, why]) : [])
const names = part === 'sdk' ? ['e2b', '@e2b/cli'] : ['@e2b/code-interpreter']
const packages = Object.fromEntries(names.map((name) => [name, version(name)]))
writeFileSync(file, JSON.stringify({ packages, excluded, calls: found }, null, 1) + '\n')
const missing = Object.keys(found).filter((call) => Object.keys(found[call]).length === 0)
if (missing.length) console.error(`no test makes these calls: ${missing.join(', ')}`)
if (unknown.length) console.error(`about these nothing is said: ${unknown.join(', ')}`)
process.exitCode = missing.length || unknown.length ? 1 : 0
