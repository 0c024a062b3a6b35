import { defineConfig } from '@playwright/test';

// The browser is Debian's; the platform behind the page is the real one, as
// `cosmicac demo` starts it (only GPUs and machines are simulated).
export default defineConfig({
  testDir: 'tests',
  globalSetup: './tests/platform.ts',
  timeout: 600_000,
  expect: { timeout: 180_000 },
  workers: 1,
  reporter: [['list']],
  use: {
    launchOptions: {
      executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
      args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
    },
    viewport: { width: 1280, height: 860 },
    trace: 'retain-on-failure',
  },
});
