import { expect, type Page, test } from '@playwright/test';
import { ready } from './platform';

async function login(page: Page) {
  const { url, email, password } = ready();
  await page.goto(url);
  await page.getByLabel('Email').fill(email);
  await page.getByRole('textbox', { name: 'Password' }).fill(password);
  await page.getByRole('button', { name: 'Log in' }).click();
  await expect(page.getByRole('heading', { name: 'Jobs' })).toBeVisible();
}

async function choose(page: Page, label: string, option: string | RegExp) {
  await page.getByRole('combobox', { name: label }).or(page.getByRole('textbox', { name: label })).first().click();
  await page.getByRole('option', { name: option }).first().click();
}

test('a wrong password is refused in words, and nothing is shown', async ({ page }) => {
  const { url, email } = ready();
  await page.goto(url);
  await page.getByLabel('Email').fill(email);
  await page.getByRole('textbox', { name: 'Password' }).fill('not the password');
  await page.getByRole('button', { name: 'Log in' }).click();
  await expect(page.getByRole('alert')).toBeVisible();
  await expect(page.getByRole('heading', { name: 'Jobs' })).toHaveCount(0);
});

test('a job is created, runs, stops and is deleted before the user\'s eyes', async ({ page }) => {
  await login(page);
  await page.getByRole('link', { name: 'Create job' }).click();
  await page.getByLabel('Job name').fill('from-browser');
  await choose(page, 'Location', /us/);
  await choose(page, 'GPU', 'GH100_H100_SXM5_80GB');
  await page.getByLabel('GPU count').fill('2');
  await expect(page.getByTestId('availability')).toContainText('free in us');
  await choose(page, 'Base OS image', 'Ubuntu22.04/CUDA12.8.1');
  await page.getByRole('button', { name: 'Create', exact: true }).click();
  await expect(page.getByRole('heading', { name: 'from-browser' })).toBeVisible();
  await expect(page.getByTestId('state').first()).toHaveText('running');
  await expect(page.getByText('simulated').first()).toBeVisible();

  await page.getByRole('link', { name: 'Racks' }).click();
  await expect(page.getByTestId('rack-us').getByText('2 held')).toBeVisible();

  await page.getByRole('link', { name: 'Jobs' }).click();
  await page.getByTestId('job-from-browser').getByRole('link').click();
  await page.getByRole('button', { name: 'Stop' }).click();
  await expect(page.getByTestId('state').first()).toHaveText('stopped');
  await page.getByRole('button', { name: 'Delete' }).click();
  await page.getByRole('button', { name: 'Delete for good' }).click();
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
  await expect(page.getByTestId('state').first()).toHaveText('failed');
  await expect(page.getByTestId('reason')).toContainText('never fits');
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
  await expect(page.getByTestId('key-browser key')).toContainText('revoked');
});

test('the racks page draws every GPU of every node', async ({ page }) => {
  await login(page);
  await page.getByRole('link', { name: 'Racks' }).click();
  await expect(page.getByTestId('rack-us').getByRole('img')).toHaveCount(4);
  await expect(page.getByTestId('rack-in').getByRole('img')).toHaveCount(2);
  await expect(page.getByTestId('rack-us')).toContainText('of 8');
});

test('no page breaks the content security policy', async ({ page }) => {
  const violations: string[] = [];
  page.on('console', (m) => { if (/content security policy/i.test(m.text())) violations.push(m.text()); });
  await login(page);
  for (const name of ['Racks', 'Health', 'API keys', 'Jobs']) await page.getByRole('link', { name, exact: true }).click();
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
