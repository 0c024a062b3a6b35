package frame

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

func TestFrameGoesThereAndBack(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	if err := Write(&b, &meshv1.Credential{Version: "v1"}); err != nil {
		t.Fatal(err)
	}
	b.WriteString("rest")
	var got meshv1.Credential
	if err := Read(&b, Guest, &got); err != nil || got.GetVersion() != "v1" {
		t.Fatalf("%v, %v", &got, err)
	}
	if b.String() != "rest" {
		t.Errorf("read past the frame, %q is left", b.String())
	}
}

func TestBadFramesAreRefused(t *testing.T) {
	t.Parallel()
	long := binary.AppendUvarint(nil, Guest+1)
	for name, c := range map[string]struct {
		frame []byte
		kind  fault.Kind
	}{
		"empty":             {nil, fault.Invalid},
		"oversized":         {append(long, make([]byte, Guest+1)...), fault.TooLarge},
		"huge length":       {binary.AppendUvarint(nil, 1<<62), fault.TooLarge},
		"endless length":    {bytes.Repeat([]byte{0xff}, 20), fault.Invalid},
		"truncated length":  {[]byte{0x80}, fault.Invalid},
		"truncated message": {[]byte{5, 1, 2}, fault.Invalid},
		"no protobuf":       {[]byte{3, 0xff, 0xff, 0xff}, fault.Invalid},
	} {
		if err := Read(bytes.NewReader(c.frame), Guest, &meshv1.Credential{}); fault.KindOf(err) != c.kind {
			t.Errorf("%s: %v, want kind %s", name, err, c.kind)
		}
	}
}

func FuzzFrame(f *testing.F) {
	var b bytes.Buffer
	_ = Write(&b, &meshv1.Credential{Kind: &meshv1.Credential_JoinToken{JoinToken: "x"}, RosterVersion: 3})
	f.Add(b.Bytes())
	f.Add([]byte{})
	f.Add(binary.AppendUvarint(nil, 1<<40))
	f.Add([]byte{2, 0x0a, 0x7f})
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		var m meshv1.Credential
		if err := Read(r, Guest, &m); err != nil {
			return
		}
		size, k := binary.Uvarint(data)
		if used := len(data) - r.Len(); k <= 0 || used != k+int(size) || size > Guest {
			t.Errorf("read %d bytes of a frame of %d", used, size)
		}
	})
}
