package script_test

import (
	"bytes"
	"context"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cosmicac/cosmicac/pkg/ssh"
	"github.com/cosmicac/cosmicac/services/wrk-agent-instance/internal/script"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func make(t *testing.T, dir, text string, out *bytes.Buffer) *script.Script {
	t.Helper()
	account, err := ssh.FindAccount("/etc", "root")
	if err != nil {
		t.Fatal(err)
	}
	account.Home = dir
	return &script.Script{
		Attempt: "a-1", Text: text, Directory: dir, Account: account, Environment: map[string]string{"GREETING": "hello"}, Output: out,
	}
}

func TestScriptRunsOnceForEachAttempt(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	s := make(t, t.TempDir(), "echo $GREETING from $PWD; echo oops >&2; exit 3", &out)
	o, err := s.Run(context.Background())
	if err != nil || !o.Ran || !o.Ended || o.ExitCode != 3 {
		t.Fatalf("%+v, %v", o, err)
	}
	if want := "hello from " + s.Directory + "\noops\n"; out.String() != want {
		t.Fatalf("printed %q, want %q", out.String(), want)
	}
	if o, err = s.Run(context.Background()); err != nil || o.Ran || !o.Ended || o.ExitCode != 3 {
		t.Fatalf("again: %+v, %v", o, err)
	}
	s.Attempt = "a-2"
	if o, err = s.Run(context.Background()); err != nil || !o.Ran {
		t.Fatalf("another attempt: %+v, %v", o, err)
	}
}

func TestScriptNamesItsInterpreter(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	s := make(t, t.TempDir(), "#!/bin/bash\nshopt -q sourcepath && echo bash\n", &out)
	if o, err := s.Run(context.Background()); err != nil || o.ExitCode != 0 || out.String() != "bash\n" {
		t.Fatalf("%+v, %v, %q", o, err, out.String())
	}
}

func TestStoppedScriptIsNotRunAgain(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	dir := t.TempDir()
	s := make(t, dir, "touch begun; sleep 1000", &out)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		for ctx.Err() == nil {
			if _, err := os.Stat(dir + "/begun"); err == nil {
				cancel()
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	if o, err := s.Run(ctx); err != nil || !o.Ran || o.Ended {
		t.Fatalf("%+v, %v", o, err)
	}
	if o, err := s.Run(context.Background()); err != nil || o.Ran || o.Ended {
		t.Fatalf("again: %+v, %v", o, err)
	}
}
