package log

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// file is a log file that rotates itself: path is the newest, path.1 the one
// before, and so on up to keep. It is not safe for concurrent use and starts no
// goroutine.
type file struct {
	path  string
	limit int64
	keep  int
	age   time.Duration
	now   func() time.Time

	f    *os.File
	size int64
}

func openFile(path string, limit int64, keep int, age time.Duration, now func() time.Time) (*file, error) {
	l := &file{path: path, limit: limit, keep: keep, age: age, now: now}
	if err := l.reopen(); err != nil {
		return nil, err
	}
	l.expire()
	return l, nil
}

func (l *file) reopen() error {
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "open log file")
	}
	info, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return fault.Wrap(fault.Unavailable, err, "open log file")
	}
	_ = l.close()
	l.f, l.size = f, info.Size()
	return nil
}

func (l *file) close() error {
	if l.f == nil {
		return nil
	}
	err := l.f.Close()
	l.f = nil
	return err
}

// write rotates first if the record would not fit. If rotating fails the old file
// grows on rather than lose the record.
func (l *file) write(p []byte) error {
	var rotated error
	if l.size > 0 && l.size+int64(len(p)) > l.limit {
		rotated = l.rotate()
	}
	if l.f == nil {
		if err := l.reopen(); err != nil {
			return err
		}
	}
	n, err := l.f.Write(p)
	l.size += int64(n)
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "write log file")
	}
	return rotated
}

func (l *file) rotate() error {
	for i := l.keep; i >= 1; i-- {
		older := l.path + "." + strconv.Itoa(i)
		newer := l.path
		if i > 1 {
			newer += "." + strconv.Itoa(i-1)
		}
		if err := os.Rename(newer, older); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fault.Wrap(fault.Unavailable, err, "rotate log file")
		}
	}
	l.expire()
	return l.reopen()
}

// expire removes rotated files that are too old, or beyond keep.
func (l *file) expire() {
	names, _ := filepath.Glob(globEscape(l.path) + ".*")
	for _, name := range names {
		i, err := strconv.Atoi(strings.TrimPrefix(name, l.path+"."))
		if err != nil || i < 1 || name != fmt.Sprintf("%s.%d", l.path, i) {
			continue
		}
		info, err := os.Stat(name)
		if err == nil && (i > l.keep || l.now().Sub(info.ModTime()) > l.age) {
			_ = os.Remove(name)
		}
	}
}

func globEscape(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}
