// E2B's code-interpreter SDK, unmodified, against a sandbox of our code-interpreter template (AENV_INTERPRETER_TEMPLATE).

import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'

import { NotFoundError, Sandbox, TimeoutError } from '@e2b/code-interpreter'

import { noteCall, skip } from './record.mjs'
import { NOBODY } from './support.mjs'
import { INTERPRETER, ofInterpreter } from './surface.mjs'

const TEMPLATE = process.env.AENV_INTERPRETER_TEMPLATE ?? 'code-interpreter-v1'

describe('code', () => {
  let sandbox

  /** A call of the SDK, noted as such. */
  function call(name, ...words) {
    noteCall(ofInterpreter(name))
    return sandbox[name](...words)
  }

  /** A test of an SDK that asks the address that it was given. */
  function story(name, told) {
    test(name, (context) => {
      if (sandbox.jupyterUrl.startsWith(process.env.E2B_SANDBOX_URL)) return told()
      INTERPRETER.forEach((name) => noteCall(ofInterpreter(name)))
      return skip(context, 'this SDK asks hosts named after sandboxes, and not E2B_SANDBOX_URL')
    })
  }

  async function text(code, options) {
    const execution = await call('runCode', code, { timeoutMs: 120_000, ...options })
    assert.equal(execution.error, undefined)
    return execution.text
  }

  before(async () => {
    sandbox = await Sandbox.create(TEMPLATE, { timeoutMs: 1_800_000, envs: { GLOBAL: 'of the sandbox' } })
  })
  after(() => sandbox?.kill())

  story('sample: what was defined is there later', async () => {
    await text('kept = 20')
    const execution = await call('runCode', "print('out'); kept + 1")
    assert.deepEqual([execution.text, execution.logs.stdout], ['21', ['out\n']])
    assert.equal(await text('const n: number = 4; n * 2', { language: 'ts' }), '8')
    assert.equal(await text('await Promise.resolve(5)', { language: 'js' }), '5')
  })

  story('output, results and errors are handed over', async () => {
    const seen = []
    const note = (kind) => (value) => { seen.push([kind, value.line ?? value.text ?? value.name]) }
    const execution = await call('runCode', "import sys\nprint('err', file=sys.stderr)\ndisplay(1)\n1/0", {
      onStderr: note('stderr'), onResult: note('result'), onError: note('error'),
    })
    assert.deepEqual(seen, [['stderr', 'err\n'], ['result', '1'], ['error', 'ZeroDivisionError']])
    assert.equal(execution.error.value, 'division by zero')
  })

  story('figures are pictures and charts', async () => {
    const { results } = await call('runCode', "import matplotlib.pyplot as plt\nplt.pie([1, 3], labels=['a', 'b'])\nplt.show()", { timeoutMs: 120_000 })
    assert.ok(results[0].png.startsWith('iVBOR'))
    assert.deepEqual([results[0].chart.type, results[0].chart.elements.map((slice) => slice.label)], ['pie', ['a', 'b']])
  })

  story('variables are the sandbox’s and the call’s', async () => {
    const read = "import os; os.environ.get('GLOBAL')"
    assert.equal(await text(read), 'of the sandbox')
    assert.equal(await text(read, { envs: { GLOBAL: 'of the call' } }), 'of the call')
    assert.equal(await text(read), 'of the sandbox')
  })

  story('contexts are apart and come and go', async () => {
    const context = await call('createCodeContext', { cwd: '/tmp', language: 'python' })
    assert.equal(await text('import os; os.getcwd()', { context }), '/tmp')
    await text('theirs = 2', { context })
    assert.ok((await call('listCodeContexts')).some((each) => each.id === context.id))
    await call('restartCodeContext', context)
    assert.equal((await call('runCode', 'theirs', { context })).error.name, 'NameError')
    await call('removeCodeContext', context)
    assert.ok(!(await call('listCodeContexts')).some((each) => each.id === context.id))
    await assert.rejects(call('removeCodeContext', NOBODY), NotFoundError)
  })

  story('code that takes too long is interrupted', async () => {
    await assert.rejects(call('runCode', 'import time\nwhile True: time.sleep(0.1)', { timeoutMs: 3000 }), TimeoutError)
    assert.equal(await text('1 + 1'), '2')
  })
})
