// `node calls.mjs FOLDER FILE`: what became of each public call, from the notes of all test files; fails if one was not made.

import { readFileSync, readdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'

import { EXCLUDED, surface, version } from './surface.mjs'

const [folder, file] = process.argv.slice(2)
const { calls, unknown } = surface()
const found = Object.fromEntries([...calls].sort().map((call) => [call, {}]))
for (const notes of readdirSync(folder)) {
  for (const [call, outcomes] of Object.entries(JSON.parse(readFileSync(join(folder, notes), 'utf8')))) {
    for (const [outcome, count] of Object.entries(outcomes)) {
      found[call] ??= {}
      found[call][outcome] = (found[call][outcome] ?? 0) + count
    }
  }
}
const excluded = Object.fromEntries(Object.entries(EXCLUDED).map(([name, why]) => [`${name}.*`, why]))
const packages = Object.fromEntries(['e2b', '@e2b/cli'].map((name) => [name, version(name)]))
const about = { packages, excluded, calls: found }
writeFileSync(file, JSON.stringify(about, null, 1) + '\n')
const missing = Object.keys(found).filter((call) => Object.keys(found[call]).length === 0)
if (missing.length) console.error(`no test makes these calls: ${missing.join(', ')}`)
if (unknown.length) console.error(`say in surface.mjs what these are: ${unknown.join(', ')}`)
process.exitCode = missing.length || unknown.length ? 1 : 0
