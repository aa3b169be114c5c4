// The SDK's public calls, read from its type declarations: those say what is public, at run time everything is.

import { readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { dirname, join } from 'node:path'

import * as e2b from 'e2b'

const require = createRequire(import.meta.url)

/** How a user of the SDK says it, by the class in the declarations. */
export const LABELS = {
  Sandbox: 'Sandbox',
  SandboxApi: 'Sandbox',
  Commands: 'Sandbox.commands',
  Filesystem: 'Sandbox.files',
  Pty: 'Sandbox.pty',
  Git: 'Sandbox.git',
  CommandHandle: 'CommandHandle',
  WatchHandle: 'WatchHandle',
  SandboxPaginator: 'SandboxPaginator',
  SnapshotPaginator: 'SnapshotPaginator',
  TemplateBase: 'Template',
  ReadyCmd: 'ReadyCmd',
}

/** What the code interpreter's `Sandbox` adds. */
export const INTERPRETER = ['runCode', 'createCodeContext', 'listCodeContexts', 'restartCodeContext', 'removeCodeContext']
export const ofInterpreter = (name) => `Sandbox (code interpreter).${name}`

/** Classes with public functions that the suite does not call, and why. */
export const EXCLUDED = {
  Volume: 'volumes are not served by this version',
  Secret: 'secrets are a resource of E2B’s cloud',
  SecretPaginator: 'secrets are a resource of E2B’s cloud',
}

/** Send nothing to a server, or are what other classes share. */
const NOT_CALLS = ['ApiClient', 'ClientFactory', 'ConnectionConfig', 'E2B', 'EnvdApiClient', 'LogEntry', 'Paginator', 'VolumeConnectionConfig']

/** Exported functions: the suite calls these, too; in a module nobody can see it. */
const FUNCTIONS = ['defaultBuildLogger', 'getSignature', 'waitForFile', 'waitForPort', 'waitForProcess', 'waitForTimeout', 'waitForURL']

export const version = (name) => JSON.parse(readFileSync(join('node_modules', name, 'package.json'), 'utf8')).version

/** Public functions of each class in a package's declarations. */
export function declared(name) {
  const text = readFileSync(join(dirname(require.resolve(name)), 'index.d.ts'), 'utf8')
  const classes = {}
  let current
  for (const line of text.split('\n')) {
    const begin = /^declare (?:abstract )?class (\w+)/.exec(line)
    const member = /^(?: {2}| {4})(?!private |protected |get |set )(?:static |abstract |async )*(\w+)(?:<.*?>)?\(/.exec(line)
    if (begin) classes[(current = begin[1])] ??= new Set()
    else if (line === '}') current = undefined
    else if (current && member && member[1] !== 'constructor') classes[current].add(member[1])
  }
  return classes
}

/** Every public call, and classes about which nothing is said here. */
export function surface() {
  const calls = new Set()
  const unknown = Object.keys(e2b).filter((name) => /^[a-z]/.test(name) && typeof e2b[name] === 'function' && name !== 'default' && !FUNCTIONS.includes(name))
  for (const [name, members] of Object.entries(declared('e2b'))) {
    const label = LABELS[name]
    if (label) for (const member of members) calls.add(`${label}.${member}`)
    else if (members.size && !(name in EXCLUDED) && !NOT_CALLS.includes(name)) unknown.push(name)
  }
  for (const name of ['SandboxPaginator', 'SnapshotPaginator']) calls.add(`${name}.nextItems`)
  return { calls, unknown }
}
