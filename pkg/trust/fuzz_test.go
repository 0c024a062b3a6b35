package trust

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// fuzzOpen asserts that an opener never panics and never returns a nil message
// without an error.
func fuzzOpen[M any](f *testing.F, seed func(l *lab) ([]byte, error), open func([]byte) (*M, error)) {
	env, err := seed(newLab(f, ""))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(env)
	f.Add(env[:len(env)/2])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		if m, err := open(data); err == nil && m == nil {
			t.Fatal("neither a record nor an error")
		}
	})
}

func FuzzOpenGenesis(f *testing.F) {
	fuzzOpen(f, func(l *lab) ([]byte, error) { return l.Genesis(), nil }, OpenGenesis)
}

func FuzzOpenRoster(f *testing.F) {
	fuzzOpen(f, func(l *lab) ([]byte, error) { return l.NextRoster(l.signer, time.Now(), nil) }, OpenRoster)
}

func FuzzOpenNetworkInfo(f *testing.F) {
	fuzzOpen(f, func(l *lab) ([]byte, error) { return l.InfoEnvelope(), nil }, OpenNetworkInfo)
}

func FuzzOpenCertificate(f *testing.F) {
	fuzzOpen(f, func(l *lab) ([]byte, error) {
		return SealCertificate(l.ork, l.certificate(l.stranger, time.Now(), time.Now().Add(time.Hour)))
	}, OpenCertificate)
}

func FuzzOpenGrant(f *testing.F) {
	fuzzOpen(f, func(l *lab) ([]byte, error) {
		return SealGrant(l.app, l.grant(l.stranger, l.worker, time.Now(), time.Now().Add(time.Hour)))
	}, OpenGrant)
}

func FuzzOpenCard(f *testing.F) {
	fuzzOpen(f, func(l *lab) ([]byte, error) {
		nid := l.ID()
		return SealCard(l.worker, &meshv1.Card{NetworkId: nid[:], Key: l.worker.ID().String()})
	}, OpenCard)
}

// fuzzFile asserts that what a file gives can be written to a file again, and that
// the records inside are never held without a signature.
func fuzzFile[M proto.Message](f *testing.F, message func(l *lab) M, records func(M) *meshv1.NetworkRecords) {
	l := newLab(f, "")
	first := message(l)
	text, err := EncodeFile(first)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add(text[:len(text)/2])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		m := first.ProtoReflect().New().Interface().(M)
		if DecodeFile(data, m) != nil {
			return
		}
		if _, err := EncodeFile(m); err != nil && len(data) < MaxFileBytes/2 {
			t.Fatalf("a good file cannot be written again: %v", err)
		}
		if n, err := OpenRecords(records(m)); err == nil && n.Genesis() == nil {
			t.Fatal("records without a genesis")
		}
	})
}

func FuzzDecodeChangeRequest(f *testing.F) {
	fuzzFile(f, func(l *lab) *meshv1.ChangeRequest {
		r := l.NewChangeRequest()
		r.SignRoster = true
		return r
	}, (*meshv1.ChangeRequest).GetBase)
}

func FuzzDecodeSignedChange(f *testing.F) {
	fuzzFile(f, func(l *lab) *meshv1.NetworkRecords { return l.Records() }, func(r *meshv1.NetworkRecords) *meshv1.NetworkRecords { return r })
}

func FuzzDecodeBackup(f *testing.F) {
	fuzzFile(f, func(l *lab) *meshv1.Backup {
		return &meshv1.Backup{Records: l.Records(), NetworkKey: l.NetworkKey(), Files: []*meshv1.BackupFile{{Name: "root.key", Content: []byte("x")}}}
	}, (*meshv1.Backup).GetRecords)
}

func FuzzDecodeJoinToken(f *testing.F) {
	f.Add("")
	f.Add("CgQAAAAA")
	f.Fuzz(func(t *testing.T, s string) {
		if m, err := DecodeJoinToken(s); err == nil && EncodeJoinToken(m) == "" {
			t.Fatal("a good token cannot be written again")
		}
	})
}
