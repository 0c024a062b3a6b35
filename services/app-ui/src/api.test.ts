import { describe, expect, it } from 'vitest';
import { ended, eventParser } from './api';

describe('the event stream', () => {
  const read = (chunks: string[]) => {
    const got: string[] = [];
    const parse = eventParser((name, data) => got.push(`${name}:${data}`));
    for (const c of chunks) parse(c);
    return got;
  };
  it('gives each event once, however the bytes are cut', () => {
    const text = 'event: job\ndata: {"a":1}\n\n: keep-alive\n\nevent: deleted\ndata: {}\n\n';
    const whole = ['job:{"a":1}', 'deleted:{}'];
    expect(read([text])).toEqual(whole);
    expect(read([...text])).toEqual(whole);
  });
  it('joins lines of data and takes CRLF', () => {
    expect(read(['data: a\r\ndata: b\r\n\r\n'])).toEqual(['message:a\nb']);
  });
  it('holds back an event that is not complete', () => {
    expect(read(['event: job\ndata: x\n'])).toEqual([]);
  });
});

it('knows the ends of a job', () => {
  expect(['queued', 'running', 'stopping', 'failed', 'stopped'].map(ended)).toEqual([false, false, false, true, true]);
});
