// Package usage keeps what requests used until app-node has it.
//
// A record goes to an append-only file in the state directory and stays there
// until app-node acknowledged it. Order is kept. Records may reach app-node
// more than once, with the same id: it counts them once. A record may be lost
// when the host dies within the fsync interval after it, when the disk refuses
// it, and when the spool is full because app-node was away for too long; the
// last two are counted and raise a warning. A killed process loses at most what
// was not yet written, a few milliseconds' worth.
//
// The package does not count tokens, price anything, or block a request.
package usage

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
)

// segmentBytes is the size at which a new file is begun.
const segmentBytes = 4 << 20

// maximumRecord bounds one record on disk. Real ones take some 200 bytes.
const maximumRecord = 64 << 10

// headerBytes stand before each record: its length and its CRC-32C, little-endian.
const headerBytes = 8

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errFull says that the spool holds as much as it may.
var errFull = errors.New("the spool is full")

// spool is a queue of records in files "<number>.usage" of one directory, and
// the file "read" that says how far app-node has acknowledged.
// One goroutine may append while another reads.
type spool struct {
	dir     string
	maximum int64

	mu       sync.Mutex
	segments []segment // oldest first; the last one is written
	file     *os.File  // the last segment
	dirty    bool      // written since the last sync
	offset   int64     // acknowledged part of the first segment
	records  int64     // not acknowledged
	bytes    int64
}

type segment struct {
	number int64
	size   int64
}

// open opens the spool in dir, which is made if needed, and cuts off what a
// crash left half written. Damage elsewhere is reported and stepped over.
func open(dir string, maximum int64) (*spool, []error, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil, fmt.Errorf("make the usage spool: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, fmt.Errorf("read the usage spool: %w", err)
	}
	s := &spool{dir: dir, maximum: maximum}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".usage")
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(name, 10, 64)
		if err != nil {
			continue
		}
		s.segments = append(s.segments, segment{number: n})
	}
	sort.Slice(s.segments, func(i, j int) bool { return s.segments[i].number < s.segments[j].number })
	first, offset := s.position()
	last := first
	if n := len(s.segments); n > 0 {
		last = max(last, s.segments[n-1].number)
	}
	var damage []error
	kept := s.segments[:0]
	for _, g := range s.segments {
		if g.number < first {
			os.Remove(s.path(g.number)) // acknowledged; a crash kept it
			continue
		}
		from := int64(0)
		if g.number == first {
			from = offset
		}
		good, n, err := check(s.path(g.number), from)
		if err != nil {
			damage = append(damage, err)
			if err := os.Truncate(s.path(g.number), good); err != nil {
				return nil, nil, fmt.Errorf("cut a damaged usage file: %w", err)
			}
		}
		if good == from {
			os.Remove(s.path(g.number)) // nothing left in it
			continue
		}
		g.size = good
		s.records += n
		s.bytes += good
		kept = append(kept, g)
	}
	s.segments = kept
	if len(s.segments) > 0 && s.segments[0].number == first {
		s.offset = offset
		s.bytes -= offset
	}
	return s, damage, s.begin(last + 1)
}

// check walks over the records of a file from an offset and returns up to where
// they are good and how many there are.
func check(path string, from int64) (good, records int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, 0, fmt.Errorf("open usage file: %w", err)
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, 0, err
	}
	from = min(from, size)
	if _, err := f.Seek(from, io.SeekStart); err != nil {
		return 0, 0, err
	}
	r := bufio.NewReader(f)
	good = from
	for {
		payload, err := readRecord(r)
		if err == io.EOF {
			return good, records, nil
		}
		if err != nil {
			return good, records, fmt.Errorf("usage file %s is damaged from byte %d on (%d bytes): %w", filepath.Base(path), good, size-good, err)
		}
		good += int64(headerBytes + len(payload))
		records++
	}
}

// readRecord reads one record; io.EOF at a clean end.
func readRecord(r io.Reader) ([]byte, error) {
	var header [headerBytes]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(header[:4])
	if n == 0 || n > maximumRecord {
		return nil, fmt.Errorf("record of %d bytes", n)
	}
	payload := make([]byte, n)
	if _, err := io.ReadFull(r, payload); err != nil {
		return nil, io.ErrUnexpectedEOF
	}
	if crc32.Checksum(payload, castagnoli) != binary.LittleEndian.Uint32(header[4:]) {
		return nil, errors.New("checksum differs")
	}
	return payload, nil
}

func (s *spool) path(number int64) string {
	return filepath.Join(s.dir, fmt.Sprintf("%012d.usage", number))
}

// begin makes a new last segment. Called with mu held, or before sharing.
func (s *spool) begin(number int64) error {
	f, err := os.OpenFile(s.path(number), os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("make a usage file: %w", err)
	}
	if s.file != nil {
		s.file.Sync()
		s.file.Close()
	}
	s.file = f
	s.segments = append(s.segments, segment{number: number})
	return syncDirectory(s.dir)
}

// append writes records in one write. All or none are in the spool after.
func (s *spool) append(records []*appv1.UsageRecord) error {
	var b []byte
	for _, r := range records {
		payload, err := proto.Marshal(r)
		if err != nil || len(payload) == 0 || len(payload) > maximumRecord {
			return fmt.Errorf("encode a usage record of %d bytes: %v", len(payload), err)
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
		b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(payload, castagnoli))
		b = append(b, payload...)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bytes+int64(len(b)) > s.maximum {
		return errFull
	}
	last := &s.segments[len(s.segments)-1]
	if n, err := s.file.WriteAt(b, last.size); err != nil {
		if n > 0 {
			s.file.Truncate(last.size) // or the next write lies over it
		}
		return fmt.Errorf("write usage: %w", err)
	}
	last.size += int64(len(b))
	s.bytes += int64(len(b))
	s.records += int64(len(records))
	s.dirty = true
	if last.size >= segmentBytes {
		return s.begin(last.number + 1)
	}
	return nil
}

// sync makes what was appended safe against a crash of the host.
func (s *spool) sync() error {
	s.mu.Lock()
	f, dirty := s.file, s.dirty
	s.dirty = false
	s.mu.Unlock()
	if !dirty {
		return nil
	}
	if err := f.Sync(); err != nil && !errors.Is(err, os.ErrClosed) { // begin syncs what it closes
		return fmt.Errorf("sync usage: %w", err)
	}
	return nil
}

// mark is a place in the spool up to which records were read.
type mark struct {
	number int64
	offset int64
	count  int64
}

// peek reads up to n of the oldest records without removing them.
func (s *spool) peek(n int) ([]*appv1.UsageRecord, mark, error) {
	s.mu.Lock()
	segments := append([]segment(nil), s.segments...)
	offset := s.offset
	s.mu.Unlock()
	var records []*appv1.UsageRecord
	var m mark
	for _, g := range segments {
		m.number, m.offset = g.number, offset
		f, err := os.Open(s.path(g.number))
		if err != nil {
			return nil, mark{}, fmt.Errorf("open usage file: %w", err)
		}
		r := bufio.NewReader(io.NewSectionReader(f, offset, g.size-offset))
		for len(records) < n {
			payload, err := readRecord(r)
			if err == io.EOF {
				break
			}
			if err != nil {
				f.Close()
				return nil, mark{}, fmt.Errorf("read usage file %d at byte %d: %w", g.number, m.offset, err)
			}
			u := &appv1.UsageRecord{}
			if err := proto.Unmarshal(payload, u); err != nil {
				f.Close()
				return nil, mark{}, fmt.Errorf("decode usage record: %w", err)
			}
			records = append(records, u)
			m.offset += int64(headerBytes + len(payload))
		}
		f.Close()
		offset = 0
		if len(records) >= n {
			break
		}
	}
	m.count = int64(len(records))
	return records, m, nil
}

// forget removes what lies before a mark of peek.
func (s *spool) forget(m mark) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.write(m); err != nil {
		return err
	}
	for len(s.segments) > 1 && s.segments[0].number < m.number {
		s.bytes -= s.segments[0].size - s.offset
		s.offset = 0
		os.Remove(s.path(s.segments[0].number)) // open removes it if this fails
		s.segments = s.segments[1:]
	}
	s.bytes -= m.offset - s.offset
	s.offset = m.offset
	s.records -= m.count
	return nil
}

// write stores a mark so that it survives a crash, whole or not at all.
func (s *spool) write(m mark) error {
	temporary := filepath.Join(s.dir, "read.new")
	f, err := os.OpenFile(temporary, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("store the place in the usage spool: %w", err)
	}
	_, err = fmt.Fprintf(f, "%d %d\n", m.number, m.offset)
	if e := f.Sync(); err == nil {
		err = e
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(temporary, filepath.Join(s.dir, "read"))
	}
	if err != nil {
		return fmt.Errorf("store the place in the usage spool: %w", err)
	}
	return nil
}

// position reads the stored mark. Without one everything counts as not
// acknowledged, which app-node sorts out by id.
func (s *spool) position() (number, offset int64) {
	b, err := os.ReadFile(filepath.Join(s.dir, "read"))
	if err != nil {
		return 0, 0
	}
	if _, err := fmt.Sscanf(string(b), "%d %d", &number, &offset); err != nil || offset < 0 {
		return 0, 0
	}
	return number, offset
}

// size is what app-node has not acknowledged.
func (s *spool) size() (records, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.records, s.bytes
}

func (s *spool) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.file.Sync()
	return errors.Join(err, s.file.Close())
}

func syncDirectory(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
