// Starts the whole platform once for all tests, and ends it after them.
import { spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';

export interface Ready { url: string; email: string; password: string }

/** Calls the API as the demo's administrator, or with another's token. */
export async function api<T>(method: string, path: string, body?: unknown, token?: string): Promise<T> {
  const { url, email, password } = ready();
  const send = async (method: string, path: string, body: unknown, token?: string) => {
    const headers = { 'Content-Type': 'application/json', ...(token ? { Authorization: `Bearer ${token}` } : {}) };
    const response = await fetch(`${url}/api/v1${path}`, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    const text = await response.text();
    if (!response.ok) throw new Error(`${method} ${path}: ${response.status} ${text}`);
    return text ? JSON.parse(text) : undefined;
  };
  administrator ??= (await send('POST', '/login', { email, password })).token as string;
  return send(method, path, body, token ?? administrator) as Promise<T>;
}

let administrator: string | undefined;

export const ready = (): Ready => JSON.parse(process.env.COSMICAC_DEMO_READY!) as Ready;

export default async function globalSetup(): Promise<() => Promise<void>> {
  const repository = resolve(import.meta.dirname ?? '.', '../../..');
  const bin = process.env.COSMICAC_BIN ?? join(repository, 'build/bin');
  const dir = mkdtempSync(join(tmpdir(), 'cosmicac-ui-'));
  const child = spawn(join(bin, 'cosmicac'), ['demo', '--no-main-job', '--dir', dir, '--bin', bin, '--ui', process.env.COSMICAC_UI ?? join(repository, 'build/ui'), '--repository', repository], { stdio: ['ignore', 'pipe', 'pipe'] });
  let output = '';
  child.stdout.on('data', (d) => { output += d; });
  child.stderr.on('data', (d) => { output += d; });
  const exited = new Promise<void>((done) => child.on('exit', () => done()));
  let over = false;
  void exited.then(() => { over = true; });
  for (let i = 0; ; i++) {
    try {
      process.env.COSMICAC_DEMO_READY = readFileSync(join(dir, 'ready.json'), 'utf8');
      break;
    } catch {
      if (over || i > 3000) {
        child.kill('SIGTERM');
        throw new Error(`the platform did not start:\n${output}`);
      }
      await new Promise((r) => setTimeout(r, 200));
    }
  }
  return async () => {
    child.kill('SIGTERM');
    await exited;
    rmSync(dir, { recursive: true, force: true });
  };
}
