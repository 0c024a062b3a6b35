import { expect, test } from '@playwright/test';
import { choose, login, state } from './pages';
import { ready } from './platform';

test('a wrong password is refused in words, and nothing is shown', async ({ page }) => {
  const { url, email } = ready();
  await page.goto(url);
  await page.getByLabel('Email').fill(email);
  await page.getByRole('textbox', { name: 'Password' }).fill('not the password');
  await page.getByRole('button', { name: 'Log in' }).click();
  await expect(page.getByRole('alert')).toBeVisible();
  await expect(page.getByRole('heading', { name: 'Jobs' })).toHaveCount(0);
});

test('a job is created, runs, stops, starts again and is deleted before the user\'s eyes', async ({ page }) => {
  await login(page);
  await page.getByRole('link', { name: 'Create job' }).click();
  await page.getByLabel('Job name').fill('from-browser');
  // What is free is chosen where it is shown.
  const available = page.getByTestId('available-us-GH100_H100_SXM5_80GB');
  await expect(available).toContainText('32 of 32 free in us, at most 8 on one node');
  await expect(available).toContainText('Nobody waits');
  await available.click();
  await expect(available).toHaveAttribute('aria-pressed', 'true');
  await choose(page, 'Base OS image', 'Ubuntu22.04/CUDA12.8.1');

  // What would happen is said before anything does, with what would have to change.
  await page.getByLabel('GPU count').fill('9');
  await page.getByRole('button', { name: 'What would happen?' }).click();
  const outcome = page.getByTestId('outcome');
  await expect(outcome).toContainText('It could never start as it is: never fits');
  await expect(outcome).toContainText('ask for 8 or fewer');
  await page.getByLabel('GPU count').fill('2');
  await expect(outcome).toHaveCount(0);
  await page.getByRole('button', { name: 'What would happen?' }).click();
  await expect(outcome).toContainText('It would start now');
  await expect(outcome).toContainText('Rack us: 2 GPUs on us-gpu-00');

  // A limit that is not valid unfolds where it is and is named there.
  await page.getByRole('button', { name: /^Limits/ }).click();
  await page.getByLabel('Stop after running for (hours)').fill('2');
  await page.getByLabel('Stop when idle for (minutes)').fill('0.1');
  await page.getByRole('button', { name: /^Limits/ }).click();
  await page.getByRole('button', { name: 'Create', exact: true }).click();
  await expect(page.getByRole('alert')).toContainText('idle_stop_seconds');
  await expect(page.getByLabel('Stop when idle for (minutes)')).toHaveAttribute('aria-invalid', 'true');
  await page.getByLabel('Stop when idle for (minutes)').fill('30');
  await page.getByRole('button', { name: 'Create', exact: true }).click();

  await expect(page.getByRole('heading', { name: 'from-browser' })).toBeVisible();
  await expect(state(page)).toHaveText('running');
  await expect(page.getByText('simulated').first()).toBeVisible();
  await expect(page.getByRole('region', { name: 'Limits' })).toContainText('Stops after 30 min without GPU use');
  await expect(page.getByRole('progressbar', { name: /^Running time/ })).toBeAttached();
  await page.getByRole('button', { name: /cluster objects, all ready/ }).click();
  await expect(page.getByRole('row', { name: /VirtualMachineInstance.*ready.*Running/ })).toBeVisible();
  await expect(page.getByRole('region', { name: 'History' })).toContainText('by rack us, attempt 1');

  await page.getByRole('link', { name: 'Racks' }).click();
  await expect(page.getByTestId('rack-us').getByText('2 held')).toBeVisible();

  // Stopping asks first, and can be let be.
  await page.getByRole('link', { name: 'Jobs' }).click();
  await page.getByTestId('job-from-browser').getByRole('link').click();
  await page.getByRole('button', { name: 'Stop', exact: true }).click();
  const dialog = page.getByRole('dialog');
  await expect(dialog).toContainText('its 2 GPUs go to whoever is next');
  await expect(dialog).toContainText('the root disk (100 GB), with everything on it');
  await page.keyboard.press('Enter');
  await expect(dialog).toHaveCount(0);
  await expect(page.getByRole('button', { name: 'Stop', exact: true })).toBeFocused();
  await expect(state(page)).toHaveText('running');
  await page.getByRole('button', { name: 'Stop', exact: true }).click();
  await dialog.getByRole('button', { name: 'Stop it' }).click();
  await expect(state(page)).toHaveText('stopped');
  await expect(page.getByTestId('reason')).toContainText('its root disk stays, its GPUs are given up');

  await page.getByRole('button', { name: 'Start again' }).click();
  await dialog.getByRole('button', { name: 'Start it' }).click();
  await expect(page.getByRole('heading', { name: 'Attempt 2' })).toBeVisible();
  await expect(state(page)).toHaveText('running');
  await expect(page.getByRole('region', { name: 'Earlier attempts' })).toContainText('stop requested');
  await page.getByRole('button', { name: 'Delete' }).click();
  await expect(dialog).toContainText('removed for good');
  await dialog.getByRole('button', { name: 'Delete for good' }).click();
  await expect(page.getByText('This job is deleted')).toBeVisible();
});

test('bad input names the field and the rule', async ({ page }) => {
  await login(page);
  await page.getByRole('link', { name: 'Create job' }).click();
  await choose(page, 'Location', /us/);
  await choose(page, 'GPU', 'GH100_H100_SXM5_80GB');
  await choose(page, 'Base OS image', 'Ubuntu22.04/CUDA12.8.1');
  await page.getByRole('button', { name: 'Create', exact: true }).click();
  await expect(page.getByRole('alert')).toContainText('name');
  await expect(page.getByLabel('Job name')).toHaveAttribute('aria-invalid', 'true');
});

test('eight GPUs of a model whose nodes have four fail with the reason', async ({ page }) => {
  await login(page);
  await page.getByRole('link', { name: 'Create job' }).click();
  await page.getByLabel('Job name').fill('too-big');
  await choose(page, 'Location', /in/);
  await choose(page, 'GPU', 'GA100_A100_PCIE_80GB');
  await page.getByLabel('GPU count').fill('8');
  await choose(page, 'Base OS image', 'Ubuntu22.04/CUDA12.8.1');
  await page.getByRole('button', { name: 'Create', exact: true }).click();
  await expect(state(page)).toHaveText('failed');
  await expect(page.getByTestId('reason')).toContainText('never fits');
  await expect(page.getByTestId('reason')).toContainText('What helps: fewer GPUs');
});

test('an API key is shown once and can be revoked', async ({ page }) => {
  await login(page);
  await page.getByRole('link', { name: 'API keys' }).click();
  await page.getByRole('button', { name: 'Create Key' }).click();
  await page.getByLabel('Name').fill('browser key');
  await page.getByRole('button', { name: 'Create', exact: true }).click();
  const key = await page.getByTestId('new-key').textContent();
  expect(key).toMatch(/^cak_/);
  await expect(page.getByRole('button', { name: 'Done' })).toBeDisabled();
  await page.getByLabel('I have saved the key').check();
  await page.getByRole('button', { name: 'Done' }).click();
  await page.reload();
  await expect(page.getByTestId('key-browser key')).toBeVisible();
  expect(await page.content()).not.toContain(key!);
  await page.getByTestId('key-browser key').getByRole('button', { name: 'Revoke' }).click();
  await page.getByRole('dialog').getByRole('button', { name: 'Revoke it for good' }).click();
  await expect(page.getByTestId('key-browser key')).toContainText('revoked');
});

test('the racks page draws every GPU of every node', async ({ page }) => {
  await login(page);
  await page.getByRole('link', { name: 'Racks' }).click();
  await expect(page.getByTestId('rack-us').getByRole('img')).toHaveCount(4);
  await expect(page.getByTestId('rack-in').getByRole('img')).toHaveCount(2);
  await expect(page.getByTestId('rack-us')).toContainText('of 8');
});

test('every page fits a narrow screen, and none breaks the content security policy', async ({ page }) => {
  const violations: string[] = [];
  page.on('console', (m) => { if (/content security policy/i.test(m.text())) violations.push(m.text()); });
  await page.setViewportSize({ width: 390, height: 844 });
  await login(page);
  for (const name of ['Volumes', 'Racks', 'Projects', 'Health', 'Network', 'API keys', 'Jobs']) {
    await page.getByRole('button', { name: 'Menu' }).click();
    await page.getByRole('link', { name, exact: true }).click();
    await expect(page.getByRole('heading', { name, exact: true, level: 2 })).toBeVisible();
    await expect(page.getByRole('status', { name: 'Loading' })).toHaveCount(0);
    await expect(page).toHaveTitle(`${name} · CosmicAC`);
    expect(await page.evaluate(() => document.documentElement.scrollWidth), `${name} is as wide as the screen`).toBeLessThanOrEqual(390);
  }
  expect(violations).toEqual([]);
});

test('the network is drawn: every daemon, and how each two are connected', async ({ page }) => {
  await login(page);
  await page.getByRole('link', { name: 'Network' }).click();
  const picture = page.getByTestId('picture');
  for (const daemon of ['app-node', 'wrk-ork', 'proxy-inference', 'wrk-monitor']) {
    await expect(picture.getByRole('button', { name: daemon, exact: true })).toBeVisible();
  }
  await expect(picture.locator('line').first()).toBeAttached();
  await picture.getByRole('button', { name: 'wrk-ork', exact: true }).click();
  await expect(page.getByTestId('daemon-wrk-ork')).toContainText('ready');
  const rows = page.getByTestId('links').locator('tbody tr');
  await expect(rows.filter({ hasText: 'app-node' }).first()).toContainText('direct');
  await expect(rows.filter({ hasText: 'wrk-ork' })).toHaveCount(await rows.count());
});
