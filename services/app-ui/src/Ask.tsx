// Ask puts a question before an act: what is lost, what is kept. The act's failure
// is shown in the same place, and the question stays.
import { Button, Code, Group, Modal, Stack, TextInput } from '@mantine/core';
import { type FormEvent, type ReactNode, useState } from 'react';
import { Failure } from './parts';

interface Question {
  /** What the button that acts says. */
  yes: string;
  no?: string;
  danger?: boolean;
  /** A text that must be typed before the act is possible. */
  typed?: string;
  /** The act cannot be carried out yet, for want of a field among the children. */
  incomplete?: boolean;
  onYes: () => Promise<unknown>;
  onClose: () => void;
  children: ReactNode;
}

export function Ask({ opened, title, ...question }: Question & { opened: boolean; title: string }) {
  return (
    <Modal opened={opened} onClose={question.onClose} title={title} closeButtonProps={{ 'aria-label': 'Close' }}>
      <Form {...question} />
    </Modal>
  );
}

function Form({ yes, no = 'Cancel', danger, typed, incomplete, onYes, onClose, children }: Question) {
  const [text, setText] = useState('');
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const submit = async (e: FormEvent) => {
    e.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await onYes();
      onClose();
    } catch (e) {
      setError(e);
      setBusy(false);
    }
  };
  return (
    <form onSubmit={submit} noValidate>
      <Stack>
        {children}
        {typed !== undefined && (
          <TextInput label={<>Type <Code>{typed}</Code> to confirm</>} autoComplete="off" spellCheck={false} value={text} onChange={(e) => setText(e.currentTarget.value)} />
        )}
        <Failure error={error} />
        <Group justify="flex-end">
          <Button variant="default" onClick={onClose} data-autofocus={danger ? true : undefined}>{no}</Button>
          <Button type="submit" color={danger ? 'red' : undefined} loading={busy} disabled={incomplete || (typed !== undefined && text !== typed)}>{yes}</Button>
        </Group>
      </Stack>
    </form>
  );
}
