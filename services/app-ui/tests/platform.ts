// Starts the whole platform once for all tests, and ends it after them.
import { spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';

export interface Ready { url: string; email: string; password: string }

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
