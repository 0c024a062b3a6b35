// How a running inference job gets another number of replicas or other arguments for
// its engine, replica by replica.
import { Button, List, NumberInput, Radio, Stack, Text, Textarea } from '@mantine/core';
import { useState } from 'react';
import { Ask } from './Ask';
import { call, type Job } from './api';
import { plural } from './format';

const lines = (text: string) => text.split('\n').map((l) => l.trim()).filter(Boolean);

export function ChangeJob({ job, changed }: { job: Job; changed: (job: Job) => void }) {
  const [opened, setOpened] = useState(false);
  // What the form began with: the job may change beneath it, and then it is refused.
  const [of, setOf] = useState(job);
  const [replicas, setReplicas] = useState<number | string>(job.replicas);
  const [text, setText] = useState('');
  const [strategy, setStrategy] = useState('stop_first');
  const open = () => {
    setOf(job);
    setReplicas(job.replicas);
    setText((job.engine_arguments ?? []).join('\n'));
    setOpened(true);
  };
  const other = lines(text).join('\n') !== (of.engine_arguments ?? []).join('\n');
  const gpus = of.gpu?.count ?? 0;
  const more = Number(replicas) - of.replicas;
  const change = async () => changed(await call<Job>('POST', `/api/v1/jobs/${of.id}/update`, {
    strategy, expected_spec_revision: of.spec_revision, ...(more !== 0 && { replicas: Number(replicas) }), ...(other && { engine_arguments: lines(text) }),
  }));
  const surge = gpus > 0 ? `Needs ${plural(gpus, 'GPU')} more meanwhile, and waits until they are free.` : 'One more machine runs meanwhile.';
  return (
    <>
      <Button variant="default" onClick={open}>Change</Button>
      <Ask opened={opened} onClose={() => setOpened(false)} title={`Change ${of.name}`} yes="Change it" incomplete={replicas === '' || (more === 0 && !other)} onYes={change}>
        <NumberInput label="Replicas" min={1} allowDecimal={false} value={replicas} onChange={setReplicas} data-autofocus />
        <Textarea label="Engine arguments" description="One a line; none at all are the model's own." autosize minRows={2} maxRows={10} spellCheck={false} styles={{ input: { fontFamily: 'monospace' } }} value={text} onChange={(e) => setText(e.currentTarget.value)} />
        <Radio.Group label="Replicas are replaced" value={strategy} onChange={setStrategy}>
          <Stack gap="xs" mt={4}>
            <Radio value="stop_first" label="Stop one, then start its successor" description="Needs no more GPUs; one replica fewer serves meanwhile." />
            <Radio value="surge_first" label="Start a successor, then stop the old one" description={`${surge} None is missing.`} />
          </Stack>
        </Radio.Group>
        <List size="sm">
          {more > 0 && <List.Item>{plural(more, 'replica')} more {more === 1 ? 'is' : 'are'} started{gpus > 0 ? `, of ${plural(gpus, 'GPU')} each` : ''}.</List.Item>}
          {more < 0 && <List.Item>{plural(-more, 'replica')} {more === -1 ? 'finishes its requests and ends' : 'finish their requests and end'}.</List.Item>}
          {other && <List.Item>Every replica is replaced, one after the other. Should a new one not come up, it stops there, and the others serve on as before.</List.Item>}
        </List>
        {of.replicas === 1 && other && strategy === 'stop_first' && <Text size="sm">It has one replica: nothing serves between the two.</Text>}
      </Ask>
    </>
  );
}
