// Volumes and public ports, as a user makes, uses and loses them.
import { expect, test } from '@playwright/test';
import { choose, login, state } from './pages';
import { api } from './platform';

test('a volume is made, mounted by a job beside a public port, kept from deletion while it is used, then removed', async ({ page }) => {
  await login(page);
  await page.getByRole('link', { name: 'Volumes' }).click();
  const dialog = page.getByRole('dialog');
  const create = async (name: string) => {
    await page.getByRole('button', { name: 'Create volume' }).click();
    await dialog.getByLabel('Volume name').fill(name);
    await dialog.getByLabel('Size (GiB)').fill('20');
    await choose(page, 'Location', 'us');
    await dialog.getByRole('button', { name: 'Create', exact: true }).click();
  };
  // What is wrong is said by the server, where it was asked for.
  await create('No Good');
  await expect(dialog.getByRole('alert')).toContainText('1 to 20 of a-z, 0-9 and hyphens');
  await dialog.getByLabel('Volume name').fill('data');
  await dialog.getByRole('button', { name: 'Create', exact: true }).click();
  const card = page.getByTestId('volume-data');
  await expect(card).toContainText('20 GiB on rack us in us');
  await expect(card.getByText('ready', { exact: true })).toBeVisible();
  await expect(card).toContainText('No job has it.');

  await page.getByRole('link', { name: 'Jobs' }).click();
  await page.getByRole('link', { name: 'Create job' }).click();
  await page.getByLabel('Job name').fill('with-disk');
  await page.getByTestId('available-us-GH100_H100_SXM5_80GB').click();
  await choose(page, 'Base OS image', 'Ubuntu22.04/CUDA12.8.1');
  await page.getByRole('button', { name: /^Volumes/ }).click();
  await page.getByRole('button', { name: 'Add volume' }).click();
  await choose(page, 'Volume 1', /^data/);
  await page.getByRole('checkbox', { name: 'Volume 1: read only' }).check();
  await page.getByRole('button', { name: /^Public ports/ }).click();
  await page.getByRole('button', { name: 'Add port' }).click();
  await page.getByRole('textbox', { name: 'Port 1', exact: true }).fill('22');
  await page.getByRole('button', { name: /^Public ports/ }).click();
  // A refused field unfolds where it is and is named there.
  await page.getByRole('button', { name: 'Create', exact: true }).click();
  await expect(page.getByRole('alert')).toContainText('ports[0].port');
  await expect(page.getByRole('textbox', { name: 'Port 1', exact: true })).toHaveAttribute('aria-invalid', 'true');
  await page.getByRole('textbox', { name: 'Port 1', exact: true }).fill('8080');
  await page.getByRole('button', { name: 'Create', exact: true }).click();

  await expect(page.getByRole('heading', { name: 'with-disk' })).toBeVisible();
  await expect(page.getByText('/volumes/data')).toBeVisible();
  await expect(page.getByText(', to read only')).toBeVisible();
  const ports = page.getByRole('region', { name: 'Public ports' });
  await expect(ports).toContainText('8080/tcp');
  await expect(state(page)).toHaveText('running');
  await expect(ports.getByRole('row', { name: /8080/ })).toContainText(/tcp-8080.*[0-9a-z].*:\d+/s);
  const job = page.url().split('/').pop()!;

  await page.getByRole('link', { name: 'Volumes' }).click();
  await expect(card).toContainText('with-disk reads it');
  await expect(card.getByRole('button', { name: 'Detach from with-disk' })).toHaveCount(0);
  await card.getByRole('button', { name: 'Delete…' }).click();
  await expect(dialog.getByRole('button', { name: 'Delete for good' })).toBeDisabled();
  await dialog.getByLabel(/^Type/).fill('data');
  await dialog.getByRole('button', { name: 'Delete for good' }).click();
  await expect(dialog.getByRole('alert')).toContainText(`it is attached to job ${job}`);
  await dialog.getByRole('button', { name: 'Keep it' }).click();

  await api('POST', `/jobs/${job}/stop`);
  await card.getByRole('button', { name: 'Detach from with-disk' }).click();
  await dialog.getByRole('button', { name: 'Detach it' }).click();
  await expect(card).toContainText('No job has it.');
  await card.getByRole('button', { name: 'Attach…' }).click();
  await choose(page, 'Job', /^with-disk/);
  await dialog.getByRole('button', { name: 'Attach it' }).click();
  await expect(card).toContainText('with-disk reads and writes it');
  await card.getByRole('link', { name: 'with-disk' }).click();
  await expect(page.getByText('/volumes/data')).toBeVisible();
  await expect(page.getByRole('region', { name: 'Public ports' })).toContainText('nowhere: the job has ended');

  // Deleting the job lets go of the volume.
  await api('DELETE', `/jobs/${job}`);
  await page.getByRole('link', { name: 'Volumes' }).click();
  await expect(card).toContainText('No job has it.');
  await card.getByRole('button', { name: 'Delete…' }).click();
  await dialog.getByLabel(/^Type/).fill('data');
  await dialog.getByRole('button', { name: 'Delete for good' }).click();
  await expect(page.getByText('You have no volumes.')).toBeVisible();
});

test('a project\'s quota bounds its volumes, and what is refused says how much is left', async ({ page }) => {
  const { projects } = await api<{ projects: { id: string }[] }>('GET', '/me');
  const project = projects[0]!.id;
  await login(page);
  await page.getByRole('link', { name: 'Projects' }).click();
  const card = page.getByTestId(`project-${project}`);
  const dialog = page.getByRole('dialog');
  await expect(card).toContainText('0 GiB of volumes held, no quota');
  await card.getByRole('button', { name: 'Quota…' }).click();
  await dialog.getByLabel('No bound of volumes').uncheck();
  await expect(dialog.getByRole('button', { name: 'Set it' })).toBeDisabled();
  await dialog.getByLabel('Volumes together (GiB)').fill('30');
  await dialog.getByRole('button', { name: 'Set it' }).click();
  await expect(card).toContainText('0 GiB of volumes held of 30');
  await expect(card).toContainText('0 GPUs held, no quota');

  await page.getByRole('link', { name: 'Volumes' }).click();
  await page.getByRole('button', { name: 'Create volume' }).click();
  await dialog.getByLabel('Volume name').fill('large');
  await dialog.getByLabel('Size (GiB)').fill('31');
  await choose(page, 'Location', 'us');
  await dialog.getByRole('button', { name: 'Create', exact: true }).click();
  await expect(dialog.getByRole('alert')).toContainText('over_quota: 31 GiB wanted');
  await expect(dialog.getByRole('alert')).toContainText('hold 0 of the 30 GiB of its quota');
  await dialog.getByLabel('Size (GiB)').fill('30');
  await dialog.getByRole('button', { name: 'Create', exact: true }).click();
  const volume = page.getByTestId('volume-large');
  await expect(volume.getByText('ready', { exact: true })).toBeVisible();
  await page.getByRole('link', { name: 'Projects' }).click();
  await expect(card).toContainText('30 GiB of volumes held of 30');

  await api('PUT', `/projects/${project}/quota`, { maximum_gpus: null, maximum_volume_gib: null });
  const { volumes } = await api<{ volumes: { id: string }[] }>('GET', '/volumes');
  for (const v of volumes) await api('DELETE', `/volumes/${v.id}?confirm=large`);
});
