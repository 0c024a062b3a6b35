package trust

import (
	"bytes"
	"encoding/pem"
	"fmt"
	"regexp"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// MaxFileBytes bounds a file of EncodeFile.
const MaxFileBytes = 8 << 20

const (
	maxBackupFiles     = 64
	maxBackupFileBytes = 1 << 20
)

// backupName is what a private file of an operator's folder may be called.
var backupName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}(\.key)?$`)

// title is the PEM type of a message that lies in a file.
func title(m proto.Message) string {
	switch m.(type) {
	case *meshv1.ChangeRequest:
		return "COSMICAC CHANGE REQUEST"
	case *meshv1.NetworkRecords:
		return "COSMICAC SIGNED CHANGE"
	case *meshv1.Backup:
		return "COSMICAC NETWORK"
	}
	return ""
}

// EncodeFile is a ChangeRequest, NetworkRecords or Backup as text in PEM form,
// which says of itself what it is and survives mail and paper.
func EncodeFile(m proto.Message) ([]byte, error) {
	if title(m) == "" {
		return nil, fault.New(fault.Internal, "%T does not lie in a file", m)
	}
	if err := checkFile(m); err != nil {
		return nil, err
	}
	body, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "encode a %s", title(m))
	}
	text := pem.EncodeToMemory(&pem.Block{Type: title(m), Bytes: body})
	if len(text) > MaxFileBytes {
		return nil, fault.New(fault.TooLarge, "a %s of %d bytes is over the bound of %d", title(m), len(text), MaxFileBytes)
	}
	return text, nil
}

// DecodeFile reads a file of EncodeFile into m and checks its form. The envelopes
// inside are not judged: OpenRecords does. Text around the block is ignored.
func DecodeFile(text []byte, m proto.Message) error {
	if len(text) > MaxFileBytes {
		return fault.New(fault.TooLarge, "a file of more than %d bytes is no %s", MaxFileBytes, title(m))
	}
	block, _ := pem.Decode(bytes.TrimLeft(text, "\xef\xbb\xbf \t\r\n"))
	if block == nil {
		return fault.New(fault.Invalid, "the file holds no %s, or not the whole of it", title(m))
	}
	if block.Type != title(m) {
		return fault.New(fault.Invalid, "the file holds a %.64s, want a %s", strings.ToValidUTF8(block.Type, "?"), title(m))
	}
	if err := proto.Unmarshal(block.Bytes, m); err != nil {
		return fault.New(fault.Invalid, "the %s is damaged: copy the whole of the file", title(m))
	}
	return checkFile(m)
}

func checkFile(m proto.Message) error {
	switch m := m.(type) {
	case *meshv1.ChangeRequest:
		return checkChangeRequest(m)
	case *meshv1.NetworkRecords:
		if len(m.GetRosterEnvelope()) == 0 && len(m.GetNetworkInfoEnvelope()) == 0 {
			return fault.New(fault.Invalid, "the signed change holds neither a roster nor a network info")
		}
	case *meshv1.Backup:
		return checkBackup(m)
	}
	return nil
}

func checkChangeRequest(m *meshv1.ChangeRequest) error {
	f := &form{record: "change request"}
	if len(m.GetBase().GetGenesisEnvelope()) == 0 || len(m.GetBase().GetRosterEnvelope()) == 0 || len(m.GetBase().GetNetworkInfoEnvelope()) == 0 {
		f.bad("base", "does not hold genesis, roster and network info")
	}
	if !m.GetSignRoster() && !m.GetSignNetworkInfo() && !m.GetRotateRootKeys() {
		f.bad("sign_roster", "nothing is asked for")
	}
	f.members(m.GetMembers(), true)
	f.bootstraps(m.GetBootstraps())
	return f.err()
}

func checkBackup(m *meshv1.Backup) error {
	f := &form{record: "backup"}
	if len(m.GetRecords().GetGenesisEnvelope()) == 0 {
		f.bad("records", "hold no genesis")
	}
	if n := len(m.GetNetworkKey()); n != 0 && n != networkKeyBytes {
		f.bad("network_key", "has %d bytes, want %d", n, networkKeyBytes)
	}
	if len(m.GetFiles()) > maxBackupFiles {
		f.bad("files", "has %d, want at most %d", len(m.GetFiles()), maxBackupFiles)
		return f.err()
	}
	seen := make(map[string]bool)
	for i, file := range m.GetFiles() {
		at := fmt.Sprintf("files[%d]", i)
		if !backupName.MatchString(file.GetName()) || seen[file.GetName()] {
			f.bad(at+".name", "%.64q is no name of a private file, or there twice", file.GetName())
		}
		seen[file.GetName()] = true
		if len(file.GetContent()) > maxBackupFileBytes {
			f.bad(at+".content", "has %d bytes, want at most %d", len(file.GetContent()), maxBackupFileBytes)
		}
	}
	return f.err()
}
