import { describe, expect, it } from 'vitest';
import { money, since, span } from './format';
import { requestOf } from './jobForm';

it('reads spans in their two largest units', () => {
  expect([-5, 0, 119, 120, 3599, 3600, 12_000, 172_799, 172_800, 187_200].map(span))
    .toEqual(['0 s', '0 s', '119 s', '2 min', '59 min', '1 h', '3 h 20 min', '47 h 59 min', '2 d', '2 d 4 h']);
});

it('counts no time before something was', () => {
  expect(since('2026-01-01T00:00:10Z', Date.parse('2026-01-01T00:00:00Z'))).toBe(0);
});

it('writes money with its hundredths', () => {
  expect([money(5, 'USD'), money(12_345, '')]).toEqual(['0.05 USD', '123.45']);
});

describe('what a form asks for', () => {
  const form = {
    kind: 'gpu_container', name: 'a', tags: [], location: 'us', gpu: 'H100', count: '2', image: 'i', disk: 100, script: '', model: 'left over', replicas: 3, authorization: true,
    placement: 'pack', priority: 0, idleMinutes: '', hours: 1.5, cost: '2.50', volumes: [], ports: [],
  };
  it('turns hours, minutes and money into the units of the API and leaves out what is empty', () => {
    expect(JSON.parse(JSON.stringify(requestOf(form)))).toEqual({
      kind: 'gpu_container', name: 'a', tags: [], location: 'us', gpu: { model: 'H100', count: 2 }, placement: 'pack', max_duration_seconds: 5400, cost_limit_cents: 250, image: 'i', disk_gib: 100,
    });
  });
  it('asks for volumes by name and for ports by number', () => {
    const rows = { volumes: [{ volume: 'data', readOnly: true }], ports: [{ port: '8080', protocol: 'udp', name: '' }] };
    expect(JSON.parse(JSON.stringify(requestOf({ ...form, ...rows })))).toMatchObject({ volumes: [{ volume: 'data', read_only: true }], ports: [{ port: 8080, protocol: 'udp' }] });
    expect(JSON.parse(JSON.stringify(requestOf({ ...form, ...rows, kind: 'managed_inference' })))).not.toHaveProperty('volumes');
  });
  it('never sends what belongs to the other kind of job', () => {
    const body = JSON.parse(JSON.stringify(requestOf({ ...form, kind: 'managed_inference', idleMinutes: 10 })));
    expect(Object.keys(body)).not.toContain('image');
    expect(Object.keys(body)).not.toContain('idle_stop_seconds');
    expect(body).toMatchObject({ model: 'left over', replicas: 3, require_authorization: true });
  });
});
