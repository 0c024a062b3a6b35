// What the tests of several pages do alike.
import { expect, type Page } from '@playwright/test';
import { api, ready } from './platform';

export async function login(page: Page, email = ready().email, password = ready().password) {
  await page.goto(ready().url);
  await page.getByLabel('Email').fill(email);
  await page.getByRole('textbox', { name: 'Password' }).fill(password);
  await page.getByRole('button', { name: 'Log in' }).click();
  await expect(page.getByRole('heading', { name: 'Jobs' })).toBeVisible();
}

export async function choose(page: Page, label: string, option: string | RegExp) {
  await page.getByRole('combobox', { name: label }).or(page.getByRole('textbox', { name: label })).first().click();
  await page.getByRole('option', { name: option }).first().click();
}

/** Makes a GPU container by the API and gives its id. */
export async function container(name: string, location: string, gpus: number, token?: string): Promise<string> {
  const model = location === 'us' ? 'GH100_H100_SXM5_80GB' : 'GA100_A100_PCIE_80GB';
  const job = await api<{ id: string }>('POST', '/jobs', { kind: 'gpu_container', name, location, gpu: { model, count: gpus }, image: 'Ubuntu22.04/CUDA12.8.1', disk_gib: 10 }, token);
  return job.id;
}

export async function openJob(page: Page, id: string, name: string) {
  await page.goto(`${ready().url}/jobs/${id}`);
  await expect(page.getByRole('heading', { name, exact: true })).toBeVisible();
}

/** The job's own state, which comes first on its page. */
export const state = (page: Page) => page.getByTestId('state').first();
