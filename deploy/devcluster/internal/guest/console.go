package guest

import (
	"os"
	"sync"
)

// consoleCap bounds each of the two console files. The guest's text is the tenant's and must not fill the disk.
const consoleCap = 2 << 20

// console is the serial console of a machine: a file of bounded size and one predecessor. It takes text from several
// goroutines, never blocks for long, and drops what cannot be written.
type console struct {
	mu     sync.Mutex
	folder *os.Root
	f      *os.File
	size   int64
}

func openConsole(folder *os.Root) (*console, error) {
	c := &console{folder: folder}
	return c, c.open()
}

func (c *console) open() error {
	f, err := c.folder.OpenFile(consoleFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	c.f, c.size = f, 0
	if fi, err := f.Stat(); err == nil {
		c.size = fi.Size()
	}
	return nil
}

// Write never fails: a full disk must not stop the machine's agent.
func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.size > 0 && c.size+int64(len(p)) > consoleCap {
		c.f.Close()
		_ = c.folder.Rename(consoleFile, consoleFile+".1")
		if err := c.open(); err != nil {
			c.f = nil
		}
	}
	if c.f != nil {
		n, _ := c.f.Write(p)
		c.size += int64(n)
	}
	return len(p), nil
}
