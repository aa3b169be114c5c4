// Runs the code of one kernel, a request at a time, as scripts of one and the same global scope. `--expose-internals` gives
// the two parts of Node's own REPL that this needs: its parser, and what it makes of top-level `await`.

import { createRequire } from 'node:module'
import * as nodeModule from 'node:module'
import { createInterface } from 'node:readline'
import { writeSync } from 'node:fs'
import { inspect } from 'node:util'
import vm from 'node:vm'

const internal = createRequire(import.meta.url)
const acorn = internal('internal/deps/acorn/acorn/dist/acorn')
const { processTopLevelAwait } = internal('internal/repl/await')
const ANSWERS = Number(process.argv[2])

/** All of it, also where the pipe is full. */
function answer(value) {
  let rest = Buffer.from(JSON.stringify(value) + '\n')
  while (rest.length) {
    try {
      rest = rest.subarray(writeSync(ANSWERS, rest))
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error
    }
  }
}

// In one pipe with the answers, so that all comes in the order in which it was said.
for (const name of ['stdout', 'stderr']) {
  process[name].write = (chunk, encoding, done) => {
    const text = typeof chunk === 'string' ? chunk : Buffer.from(chunk).toString()
    answer({ kind: 'stream', name, text })
    ;(typeof encoding === 'function' ? encoding : done)?.()
    return true
  }
}

globalThis.require = createRequire(`${process.cwd()}/`)
/** Shows something richer than text: `display({ 'text/html': '<b>…</b>' })`. */
globalThis.display = (data) => answer({ kind: 'display_data', data, metadata: {} })

/** Ends the wait for what the code awaits. Between two requests nobody is interrupted. */
let interrupt = () => {}
process.on('SIGINT', () => interrupt())

/**
 * Code as it is run: types gone, `import` in its dynamic form, and declarations that can be made again, for cells are run
 * again. Code that does not parse stays as it is, for its error to say why.
 */
function prepared(code, typescript) {
  const plain = typescript ? nodeModule.stripTypeScriptTypes(code) : code
  // What looks like an object is meant as one.
  if (/^\s*\{/.test(plain) && parsed(`(${plain}\n)`)) return `(${plain}\n)`
  const program = parsed(plain)
  if (!program) return plain
  let done = ''
  let at = 0
  for (const node of program.body) {
    const text = replacement(node, plain)
    if (text === undefined) continue
    done += plain.slice(at, node.start) + text
    at = node.end
  }
  return done + plain.slice(at)
}

function parsed(code) {
  try {
    return acorn.parse(code, { ecmaVersion: 'latest', sourceType: 'module' })
  } catch {
    return undefined
  }
}

function replacement(node, code) {
  const text = code.slice(node.start, node.end)
  if (node.type === 'VariableDeclaration' && node.kind !== 'var') return `var${text.slice(node.kind.length)}`
  if (node.type === 'ClassDeclaration') return `var ${node.id.name} = ${text};`
  if (node.type !== 'ImportDeclaration') return undefined
  const module = `await import(${node.source.raw})`
  const whole = node.specifiers.find((each) => each.type === 'ImportNamespaceSpecifier')
  const names = node.specifiers
    .filter((each) => each !== whole)
    .map((each) => `${each.imported?.name ?? each.imported?.raw ?? 'default'}: ${each.local.name}`)
  const lines = [whole && `var ${whole.local.name} = ${module};`, names.length && `var { ${names.join(', ')} } = ${module};`]
  return lines.filter(Boolean).join(' ') || `${module};`
}

const OPTIONS = { filename: 'code', importModuleDynamically: vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER }

/** The value of the last expression. */
async function run({ code, typescript }) {
  const plain = prepared(code, typescript)
  const wrapped = parsed(plain) ? processTopLevelAwait(plain) : null
  if (wrapped === null) return new vm.Script(plain, OPTIONS).runInThisContext({ breakOnSigint: true })
  const interrupted = new Promise((_resolve, reject) => {
    interrupt = () => reject(new Error('Execution was interrupted'))
  })
  try {
    const result = await Promise.race([new vm.Script(wrapped, OPTIONS).runInThisContext({ breakOnSigint: true }), interrupted])
    return result?.value
  } finally {
    interrupt = () => {}
  }
}

/** Both for people and, where it is plain data, for programs. */
function shown(value) {
  const data = { 'text/plain': typeof value === 'string' ? value : inspect(value) }
  if (value !== null && typeof value === 'object' && [Object.prototype, Array.prototype, null].includes(Object.getPrototypeOf(value))) {
    try {
      data['application/json'] = JSON.parse(JSON.stringify(value))
    } catch {
      // Circular, or with what JSON has no word for.
    }
  }
  return data
}

async function serve(request) {
  try {
    const value = await run(request)
    if (value !== undefined) answer({ kind: 'execute_result', data: shown(value), metadata: {} })
    answer({ kind: 'done' })
  } catch (error) {
    const isError = error instanceof Error || (error !== null && typeof error === 'object' && 'message' in error)
    const name = isError ? error.name : 'Error'
    const value = isError ? error.message : inspect(error)
    answer({ kind: 'error', ename: name, evalue: value, traceback: String(error?.stack ?? value).split('\n') })
  }
}

process.on('uncaughtException', (error) => process.stderr.write(`Uncaught ${error?.stack ?? inspect(error)}\n`))
process.on('unhandledRejection', (error) => process.stderr.write(`Unhandled rejection: ${error?.stack ?? inspect(error)}\n`))

let last = Promise.resolve()
createInterface({ input: process.stdin }).on('line', (line) => {
  last = last.then(() => serve(JSON.parse(line)))
}).on('close', () => process.exit(0))
