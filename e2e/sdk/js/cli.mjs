// The official command-line client at work; it has only the key and the server's address.

import { execFile } from 'node:child_process'
import { join } from 'node:path'
import { promisify } from 'node:util'

import { noteCall } from './record.mjs'

const run = promisify(execFile)
// It has a way of its own with other signals.
const LIMITS = { timeout: 120_000, killSignal: 'SIGKILL' }
const PROGRAM = join('node_modules', '@e2b', 'cli', 'dist', 'index.js')

/** A client whose settings are kept in the folder `home`. */
export function client(home, overridden = {}) {
  const { E2B_API_KEY, E2B_API_URL, E2B_SANDBOX_URL, PATH } = process.env
  const env = { E2B_API_KEY, E2B_API_URL, E2B_SANDBOX_URL, PATH, HOME: home, NO_COLOR: '1', ...overridden }

  /** `started('sandbox list', '--format', 'json')`, with its process as `child`. */
  function started(command, ...options) {
    noteCall(`e2b ${command}`)
    return run(process.execPath, [PROGRAM, ...command.split(' '), ...options], { env, ...LIMITS })
  }

  /** In a terminal, into which `input` is typed once something is shown; what it showed. */
  async function typed(input, command, ...options) {
    noteCall(`e2b ${command}`)
    const words = [process.execPath, PROGRAM, ...command.split(' '), ...options]
    const line = words.map((word) => `'${word}'`).join(' ')
    const running = run('script', ['-qec', line, '/dev/null'], { env: { ...env, TERM: 'xterm' }, ...LIMITS })
    let shown = ''
    running.child.stdout.on('data', (text) => {
      // A shell's prompt: before it, input would be the client's.
      if (!shown.includes('$ ') && (shown + text).includes('$ ')) running.child.stdin.write(input)
      shown += text
    })
    await running
    return shown
  }

  /** What it prints. Its input has ended: some commands wait for that. */
  async function printed(...words) {
    const running = started(...words)
    running.child.stdin.end()
    return (await running).stdout
  }

  /** Why this client cannot be asked for `command`; false if it can. */
  async function lacks(command) {
    const words = command.split(' ')
    const { stdout } = await run(process.execPath, [PROGRAM, ...words.slice(0, -1), '--help'], { env })
    return new RegExp(`^  ${words.at(-1)}\\b`, 'm').test(stdout) ? false : `this client has no ${command}`
  }

  return { started, printed, typed, lacks }
}

/** The JSON objects that stand on lines of their own. */
export const objects = (text) => text.split('\n').filter((line) => line.startsWith('{')).map((line) => JSON.parse(line))
