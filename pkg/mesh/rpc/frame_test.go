package rpc

import (
	"bytes"
	"encoding/binary"
	"testing"

	"google.golang.org/grpc/metadata"
)

func FuzzReadFrame(f *testing.F) {
	f.Add(endFrame(append(appendPairs(appendString(append(beginFrame(nil, kindRequest, 7), 0), "/a.B/C"), metadata.Pairs("k", "v")), 1, 2, 3), 0))
	f.Add(endFrame(append(appendPairs(append(beginFrame(nil, kindAnswer, 1<<60), flagHeader), metadata.Pairs("k", "v", "k", "w")), 9), 0))
	f.Add(endFrame(append(beginFrame(nil, kindAnswer, 3), flagMore|flagFailed), 0))
	f.Add(endFrame(beginFrame(nil, kindCancel, 300), 0))
	f.Add([]byte{0, 0, 0, 2, 9})
	f.Add([]byte{255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, b []byte) {
		in := newInlet(bytes.NewReader(b))
		for {
			var got frame
			if err := in.readFrame(&got); err != nil {
				return
			}
			if len(got.method) > maxMethod || len(got.body) > maxFrameBytes || len(got.header) > maxPairs || len(got.trailer) > maxPairs || got.id == 0 {
				t.Fatalf("out of bounds: %+v", got)
			}
			// What was read, written again, reads the same.
			again := beginFrame(nil, got.kind, got.id)
			switch got.kind {
			case kindRequest:
				again = appendPairs(appendString(binary.AppendUvarint(again, got.timeout), string(got.method)), got.header)
			case kindAnswer:
				again = append(again, got.flags)
				if got.flags&flagHeader != 0 {
					again = appendPairs(again, got.header)
				}
				if got.flags&flagTrailer != 0 {
					again = appendPairs(again, got.trailer)
				}
			}
			again = endFrame(append(again, got.body...), 0)
			if len(again) > maxFrameBytes { // shorter forms of the same numbers were read
				return
			}
			var twice frame
			if err := newInlet(bytes.NewReader(again)).readFrame(&twice); err != nil {
				t.Fatalf("written again: %v", err)
			}
			if twice.id != got.id || twice.timeout != got.timeout || !bytes.Equal(twice.method, got.method) || !bytes.Equal(twice.body, got.body) || len(twice.header) != len(got.header) {
				t.Fatalf("read %+v, then %+v", got, twice)
			}
		}
	})
}
