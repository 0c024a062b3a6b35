package cloudinit

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"io/fs"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestParseTakesWhatASimulatedVMPlays(t *testing.T) {
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	z.Write([]byte("zipped"))
	z.Close()
	s, err := Parse([]byte(`#cloud-config
hostname: job-1-r0-n0
users: [default]
system_info: {default_user: {name: rocky}}
runcmd: [[sh, -c, "rm -rf /"]]
write_files:
- path: /etc/cosmicac/seed.json
  permissions: '0600'
  owner: root:root
  content: |
    {"v":1}
- {path: /a, permissions: 0755, encoding: b64, content: aGVs
    bG8=}
- {path: /b/../c, encoding: gz+b64, content: ` + base64.StdEncoding.EncodeToString(packed.Bytes()) + `}
- {path: /n, content: 42, permissions: '1777', append: true}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Seed{Hostname: "job-1-r0-n0", DefaultUser: "rocky", Files: []File{
		{Path: "/etc/cosmicac/seed.json", Mode: 0o600, Owner: "root:root", Content: []byte("{\"v\":1}\n")},
		{Path: "/a", Mode: 0o755, Content: []byte("hello")},
		{Path: "/c", Mode: 0o644, Content: []byte("zipped")},
		{Path: "/n", Mode: 0o777 | fs.ModeSticky, Content: []byte("42"), Append: true},
	}}
	if !reflect.DeepEqual(s, want) {
		t.Fatalf("got  %+v\nwant %+v", s, want)
	}
}

func TestParseRefusesInWords(t *testing.T) {
	for in, want := range map[string]string{
		"#!/bin/sh\nreboot\n": "not a #cloud-config",
		"#cloud-config\nwrite_files: [{path: relative, content: x}]":                   "path must be absolute",
		"#cloud-config\nwrite_files: [{path: /x, permissions: rw, content: x}]":        "octal",
		"#cloud-config\nwrite_files: [{path: /x, encoding: rot13, content: x}]":        "rot13",
		"#cloud-config\nwrite_files: [{path: /x, encoding: b64, content: '%%'}]":       "not base64",
		"#cloud-config\nsystem_info: {default_user: {name: 'x:0:0::/:/bin/sh\nroot'}}": "user name",
		"#cloud-config\n- a list": "parse #cloud-config",
	} {
		if _, err := Parse([]byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", in, err, want)
		}
	}
	if s, err := Parse(nil); err != nil || len(s.Files) != 0 {
		t.Errorf("empty user data: %+v, %v", s, err)
	}
}

func TestParseUnit(t *testing.T) {
	u, err := ParseUnit([]byte(`[Unit]
Description=the agent
[Service]
# comment
Environment=A=1 "B=two words"
Environment=C=%%d
ExecStart=-/run/cosmicac/agent/agent --seed /etc/cosmicac/seed.json \
  --name "a b" --a=${A}
Restart=always
RestartSec=2s
TimeoutStopSec=1min
User=nobody
[Install]
WantedBy=multi-user.target
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Unit{
		Exec:        []string{"/run/cosmicac/agent/agent", "--seed", "/etc/cosmicac/seed.json", "--name", "a b", "--a=1"},
		Environment: []string{"A=1", "B=two words", "C=%%d"}, Restart: "always",
		RestartWait: 2 * time.Second, StopWait: time.Minute, Ignored: []string{"User"},
	}
	if !reflect.DeepEqual(u, want) {
		t.Fatalf("got  %+v\nwant %+v", u, want)
	}
	for in, want := range map[string]string{
		"[Service]\nRestart=always\n":                   "ExecStart is missing",
		"[Service]\nExecStart=/a \"b\n":                 "not closed",
		"[Service]\nExecStart=/a\nRestartSec=a while\n": "RestartSec",
	} {
		if _, err := ParseUnit([]byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", in, err, want)
		}
	}
	if !(Unit{Restart: "on-failure"}).Restarts(1) || (Unit{Restart: "on-failure"}).Restarts(0) || (Unit{Restart: "no"}).Restarts(1) {
		t.Error("restart rules are wrong")
	}
}
