// What an operator does with racks, nodes and projects, and what users see of it.
import { expect, type Page, test } from '@playwright/test';
import { container, login, openJob, state } from './pages';
import { api, ready } from './platform';

async function act(page: Page, on: string, what: string) {
  await page.getByRole('button', { name: `Actions for ${on}` }).click();
  await page.getByRole('menuitem', { name: what }).click();
}

test('a job that must wait says for what, and starts by itself once another ends', async ({ page }) => {
  const first = await container('first', 'in', 4);
  const second = await container('second', 'in', 4);
  const third = await container('third', 'in', 4);
  await login(page);
  await openJob(page, third, 'third');
  await expect(state(page)).toHaveText('queued');
  await expect(page.getByTestId('reason')).toContainText('4 GPUs of GA100_A100_PCIE_80GB wanted; 0 of 8 in in are free');
  await expect(page.getByTestId('queue')).toContainText('Nobody else waits for GA100_A100_PCIE_80GB in in. 8 of 8 are held.');
  await api('DELETE', `/jobs/${first}`);
  await expect(state(page)).toHaveText('running');
  await expect(page.getByTestId('queue')).toHaveCount(0);
  for (const id of [second, third]) await api('DELETE', `/jobs/${id}`);
});

test('a drained rack tells the owner of a job by when it must be left, and uncordoning takes it back', async ({ page, context }) => {
  const id = await container('guest', 'in', 1);
  await login(page);
  await openJob(page, id, 'guest');
  await expect(state(page)).toHaveText('running');
  const operator = await context.newPage();
  await login(operator);
  await operator.getByRole('link', { name: 'Racks' }).click();
  await act(operator, 'rack in', 'Drain…');
  const dialog = operator.getByRole('dialog');
  await expect(dialog).toContainText('The owners of what runs here');
  await dialog.getByLabel('Deadline (hours from now)').fill('2');
  await dialog.getByRole('button', { name: 'Drain it' }).click();
  await expect(operator.getByText(/The owners of \d+ jobs? are told/)).toBeVisible();
  await expect(operator.getByTestId('rack-in')).toContainText('draining');

  await expect(page.getByTestId('condition-draining')).toContainText('rack in is being drained; what runs there is stopped at');
  await expect(page.getByTestId('condition-draining')).toContainText('save your work');
  await act(operator, 'rack in', 'Uncordon');
  await expect(operator.getByTestId('rack-in')).not.toContainText('draining');
  await expect(page.getByTestId('condition-draining')).toHaveCount(0);
  await expect(state(page)).toHaveText('running');
  await api('DELETE', `/jobs/${id}`);
});

test('a quarantined node gives nothing, says why, and is opened again', async ({ page }) => {
  await login(page);
  await page.getByRole('link', { name: 'Racks' }).click();
  const node = page.getByTestId('node-us-gpu-03');
  await act(page, 'node us-gpu-03', 'Quarantine…');
  const dialog = page.getByRole('dialog');
  await expect(dialog.getByRole('button', { name: 'Quarantine it' })).toBeDisabled();
  await dialog.getByLabel('Why').fill('its fans are being replaced');
  await dialog.getByRole('button', { name: 'Quarantine it' }).click();
  await expect(node).toContainText('quarantined: its fans are being replaced');
  await expect(node.getByRole('img')).toHaveAccessibleName(/0 free of 8/);
  const listed = page.getByTestId('quarantine-us-gpu-03');
  await expect(listed).toContainText('by you');
  await page.goto(`${ready().url}/jobs/new`);
  await expect(page.getByTestId('available-us-GH100_H100_SXM5_80GB')).toContainText('24 of 32 free');
  await page.goBack();
  await listed.getByRole('button', { name: 'Lift…' }).click();
  await dialog.getByRole('button', { name: 'Open it again' }).click();
  await expect(listed).toHaveCount(0);
  await expect(node.getByRole('img')).toHaveAccessibleName(/8 free of 8/);
});

test('a rack is forgotten only by force while it is used, is listed then, and gives all back once it returns', async ({ page }) => {
  const id = await container('left-there', 'in', 2);
  await login(page);
  await openJob(page, id, 'left-there');
  await expect(state(page)).toHaveText('running');
  await page.getByRole('link', { name: 'Racks' }).click();
  await act(page, 'rack in', 'Forget…');
  const dialog = page.getByRole('dialog');
  await dialog.getByRole('button', { name: 'Forget it' }).click();
  await expect(dialog.getByRole('alert')).toContainText(/rack in still holds \d+ attempts/);
  await dialog.getByLabel('By force').check();
  await expect(dialog.getByRole('button', { name: 'Forget it' })).toBeDisabled();
  await dialog.getByLabel('Type in to confirm').fill('in');
  await dialog.getByRole('button', { name: 'Forget it' }).click();
  await expect(page.getByTestId('rack-in')).toHaveCount(0);

  const tomb = page.getByTestId('forgotten-in');
  await expect(tomb).toContainText('left-there');
  await expect(tomb).toContainText('unknown');
  await openJob(page, id, 'left-there');
  await expect(page.getByTestId('condition-abandoned')).toContainText('may still run there');

  await page.getByRole('link', { name: 'Racks' }).click();
  await tomb.getByRole('button', { name: 'Register again…' }).click();
  await dialog.getByRole('button', { name: 'Register it' }).click();
  await expect(tomb.getByRole('row', { name: /left-there.*yes/ })).toBeVisible();
  await tomb.getByRole('button', { name: 'Adopt…' }).click();
  await dialog.getByRole('button', { name: 'Adopt it' }).click();
  await expect(tomb).toHaveCount(0);
  await openJob(page, id, 'left-there');
  await expect(page.getByTestId('condition-abandoned')).toHaveCount(0);
  await expect(state(page)).toHaveText('running');
  await expect(page.getByRole('heading', { name: 'Attempt 1' })).toBeVisible();
  await api('DELETE', `/jobs/${id}`);
});

test('a project\'s quota holds its job back until an administrator raises it; its owner is offered no power', async ({ page, browser }) => {
  const email = 'ana@example.org', password = 'another fine password';
  await api('POST', '/users', { email, password });
  await login(page);
  await page.getByRole('link', { name: 'Projects' }).click();
  const card = page.getByRole('region', { name: `Project of ${email}` });
  const dialog = page.getByRole('dialog');
  const set = async (most: string) => {
    await card.getByRole('button', { name: 'Quota…' }).click();
    await dialog.getByLabel('No bound of GPUs').uncheck();
    await dialog.getByLabel('GPUs at once').fill(most);
    await dialog.getByRole('button', { name: 'Set it' }).click();
    await expect(card).toContainText(`of ${most}`);
  };
  await set('1');

  const ana = await browser.newPage();
  await login(ana, email, password);
  await expect(ana.getByRole('link', { name: 'Network' })).toHaveCount(0);
  await ana.getByRole('link', { name: 'Racks' }).click();
  await expect(ana.getByTestId('rack-us')).toBeVisible();
  await expect(ana.getByRole('button', { name: /^Actions/ })).toHaveCount(0);
  await ana.getByRole('link', { name: 'Projects' }).click();
  await expect(ana.getByRole('region', { name: /^Project of/ })).toHaveCount(1);
  await expect(ana.getByText('0 GPUs held of 1')).toBeVisible();
  await expect(ana.getByRole('button', { name: 'Quota…' })).toHaveCount(0);

  const { token } = await api<{ token: string }>('POST', '/login', { email, password });
  const id = await container('two-gpus', 'us', 2, token);
  await openJob(ana, id, 'two-gpus');
  await expect(ana.getByTestId('reason')).toContainText('over quota');
  await set('2');
  await expect(state(ana)).toHaveText('running');
  await expect(card).toContainText('2 GPUs held of 2');
  await api('DELETE', `/jobs/${id}`);
});
