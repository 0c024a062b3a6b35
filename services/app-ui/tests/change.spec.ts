// How a running inference job is changed, replica by replica.
import { expect, test } from '@playwright/test';
import { login, openJob, state } from './pages';
import { api } from './platform';

interface Shown { replicas: number; engine_arguments: string[]; spec_revision: number; replica_list: { index: number; state: string; attempts: { id: string; spec_revision: number }[] }[] }

test('a running inference job gets a second replica and other arguments, one replica after the other', async ({ page }) => {
  const { id } = await api<{ id: string }>('POST', '/jobs', { kind: 'managed_inference', name: 'changing', location: 'in', model: 'cosmicac/ngram-demo', replicas: 1 });
  const shown = () => api<Shown>('GET', `/jobs/${id}`);
  await login(page);
  await openJob(page, id, 'changing');
  await expect(state(page)).toHaveText('running');
  const first = (await shown()).replica_list[0]!.attempts.at(-1)!.id;

  await page.getByRole('button', { name: 'Change', exact: true }).click();
  const dialog = page.getByRole('dialog');
  await expect(dialog.getByRole('button', { name: 'Change it' })).toBeDisabled();
  await dialog.getByLabel('Replicas', { exact: true }).fill('2');
  await expect(dialog).toContainText('1 replica more is started');
  await dialog.getByLabel('Engine arguments').fill('--max-num-seqs\n8');
  await expect(dialog).toContainText('nothing serves between the two');
  await dialog.getByRole('radio', { name: 'Start a successor, then stop the old one' }).check();
  await expect(dialog).not.toContainText('nothing serves between the two');

  // Somebody else is faster: nothing is overwritten.
  await api('POST', `/jobs/${id}/update`, { strategy: 'surge_first', engine_arguments: ['--max-num-seqs', '4'] });
  await dialog.getByRole('button', { name: 'Change it' }).click();
  await expect(dialog.getByRole('alert')).toContainText('expected_spec_revision');
  await dialog.getByRole('button', { name: 'Cancel' }).click();
  await page.getByRole('button', { name: 'Change', exact: true }).click();
  await expect(dialog.getByLabel('Engine arguments')).toHaveValue('--max-num-seqs\n4');
  await dialog.getByLabel('Replicas', { exact: true }).fill('2');
  await dialog.getByLabel('Engine arguments').fill('--max-num-seqs\n8');
  await dialog.getByRole('radio', { name: 'Start a successor, then stop the old one' }).check();
  await dialog.getByRole('button', { name: 'Change it' }).click();
  await expect(dialog).toHaveCount(0);
  await expect(page.getByTestId('condition-updating')).toContainText('surge first');

  await expect(page.getByTestId('condition-updating')).toHaveCount(0);
  await expect(state(page)).toHaveText('running');
  const after = await shown();
  expect(after.engine_arguments).toEqual(['--max-num-seqs', '8']);
  expect(after.replica_list.filter((r) => r.state === 'running').map((r) => r.attempts.at(-1)!.spec_revision)).toEqual([3, 3]);
  expect(after.replica_list.flatMap((r) => r.attempts.map((a) => a.id))).not.toContain(first);
  const history = page.getByRole('region', { name: 'History' });
  await expect(history).toContainText('update finished: all of 2 replicas are of specification 3');
  await history.getByRole('button', { name: /^Show all/ }).click();
  await expect(history).toContainText('update asked: specification 3, surge first, 2 replicas');
  await api('DELETE', `/jobs/${id}`);
});
