// Holepunch's side of make bench-mesh: the same questions as the Go program
// answers, in JSON-RPC over standard input and output. It ends with its input.
// Every address is loopback; the DHT is hyperdht's own local test net.
const createTestnet = require('hyperdht/testnet')
const DHT = require('hyperdht')
const RPC = require('@hyperswarm/rpc')
const crypto = require('crypto')
const readline = require('readline')

const now = () => process.hrtime.bigint()
const since = (t) => Number(now() - t) // nanoseconds
const at = (sorted, p) => sorted[Math.min(Math.max(Math.ceil(p * sorted.length), 1), sorted.length) - 1]
const hex = (s) => Buffer.from(s, 'hex')

let client // an RPC client to the server
let streams // opens byte streams to the server
let node // a DHT node that stands

function join (bootstrap) {
  return new DHT({ bootstrap, host: '127.0.0.1', ephemeral: true })
}

async function answer (dht) {
  const server = new RPC({ dht, keyPair: DHT.keyPair() }).createServer()
  await server.listen()
  server.respond('echo', (b) => b)
  return server.publicKey.toString('hex')
}

async function echo (c, payload) {
  const b = await c.request('echo', payload)
  if (b.length !== payload.length) throw new Error(`an answer of ${b.length} bytes to ${payload.length}`)
}

const methods = {
  // Serve answers echo, and on a stream sends as many bytes as it was asked for.
  async Serve () {
    const testnet = await createTestnet(4, { host: '127.0.0.1' })
    const dht = testnet.createNode()
    const server = dht.createServer((s) => {
      s.on('error', () => s.destroy())
      s.on('data', (d) => {
        let left = Number(d.readBigUInt64BE(0))
        const chunk = Buffer.alloc(65536)
        const pump = () => {
          while (left > 0 && !s.destroyed) {
            const k = Math.min(left, chunk.length)
            left -= k
            if (!s.write(k === chunk.length ? chunk : chunk.subarray(0, k))) { s.once('drain', pump); return }
          }
        }
        pump()
      })
    })
    const key = DHT.keyPair()
    await server.listen(key)
    return { Bootstrap: testnet.bootstrap, Key: await answer(dht), Bulk: key.publicKey.toString('hex') }
  },

  async Open ({ Endpoint }) {
    const dht = join(Endpoint.Bootstrap)
    client = new RPC({ dht }).connect(hex(Endpoint.Key))
    streams = () => dht.connect(hex(Endpoint.Bulk))
    await echo(client, Buffer.from('hello'))
    return {}
  },

  async Unary ({ Payload, Callers, Nanoseconds }) {
    const payload = crypto.randomBytes(Payload)
    const times = []
    const used = process.cpuUsage()
    const began = now()
    const end = began + BigInt(Nanoseconds)
    await Promise.all(Array.from({ length: Callers }, async () => {
      for (let t = now(); t < end;) {
        await echo(client, payload)
        const next = now()
        times.push(Number(next - t))
        t = next
      }
    }))
    const took = since(began)
    const { user, system } = process.cpuUsage(used)
    times.sort((a, b) => a - b)
    return { Calls: times.length, P50: at(times, 0.5), P99: at(times, 0.99), Nanoseconds: took, CPU: (user + system) * 1000 }
  },

  async Bulk ({ Bytes, Nanoseconds }) {
    const s = streams()
    await new Promise((resolve, reject) => { s.once('open', resolve); s.once('error', reject) })
    const take = (bytes, limit) => new Promise((resolve, reject) => {
      let got = 0
      const began = now()
      const ask = Buffer.alloc(8)
      ask.writeBigUInt64BE(BigInt(bytes))
      const onData = (d) => {
        got += d.length
        if (got >= bytes || since(began) > limit) {
          s.off('data', onData)
          s.off('error', reject)
          resolve([got, since(began)])
        }
      }
      s.on('data', onData)
      s.once('error', reject)
      s.write(ask)
    })
    await take(Math.ceil(Bytes / 32), Infinity)
    const used = process.cpuUsage()
    const [got, took] = await take(Bytes, Nanoseconds)
    const { user, system } = process.cpuUsage(used)
    s.on('error', () => {})
    s.destroy()
    return { Bytes: got, Nanoseconds: took, CPU: (user + system) * 1000 }
  },

  // Crowd stands up a DHT, in which some nodes answer echo.
  async Crowd ({ Nodes, Answering }) {
    const testnet = await createTestnet(Nodes, { host: '127.0.0.1' })
    const keys = []
    for (let i = 0; i < Answering; i++) keys.push(await answer(testnet.createNode()))
    return { Bootstrap: testnet.bootstrap, Keys: keys }
  },

  // Cold is a fresh process's way to its first answered call by key.
  async Cold ({ Bootstrap, Key }) {
    node = join(Bootstrap)
    await echo(new RPC({ dht: node }).connect(hex(Key)), Buffer.from('hello'))
    return {}
  },

  // Warm is the same for more keys, from the node that Cold left.
  async Warm ({ Keys }) {
    const times = []
    for (const key of Keys) {
      const began = now()
      await echo(new RPC({ dht: node }).connect(hex(key)), Buffer.from('hello'))
      times.push(since(began))
    }
    return { Nanoseconds: times }
  }
}

const lines = readline.createInterface({ input: process.stdin })
lines.on('line', async (line) => {
  const { method, params, id } = JSON.parse(line)
  let result = null
  let error = null
  try {
    result = await methods[method.replace('Program.', '')](params[0])
  } catch (e) {
    error = e.stack
  }
  process.stdout.write(JSON.stringify({ id, result, error }) + '\n')
})
lines.on('close', () => process.exit(0))
