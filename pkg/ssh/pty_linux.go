package ssh

import (
	"encoding/binary"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// openPTY opens a new terminal. The master is in non-blocking mode, so reads of
// it can be given up by a deadline or by Close, which no library does at present.
func openPTY() (master, slave *os.File, name string, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, "", fmt.Errorf("open a terminal at /dev/ptmx: %w", err)
	}
	master = os.NewFile(uintptr(fd), "/dev/ptmx")
	defer func() {
		if err != nil {
			master.Close()
		}
	}()
	if err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, nil, "", fmt.Errorf("unlock a terminal: %w", err)
	}
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return nil, nil, "", fmt.Errorf("number a terminal: %w", err)
	}
	name = fmt.Sprintf("/dev/pts/%d", number)
	// By the master rather than by path: the path can mean another terminal
	// where /dev/pts was mounted twice.
	peer, errno := ioctlPeer(fd)
	if errno != nil {
		if peer, err = unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0); err != nil {
			return nil, nil, "", fmt.Errorf("open terminal %s: %w", name, err)
		}
	}
	return master, os.NewFile(uintptr(peer), name), name, nil
}

func ioctlPeer(master int) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return 0, errno
	}
	return int(fd), nil
}

func resize(tty *os.File, columns, rows, width, height uint32) error {
	return control(tty, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{
			Row: clampSize(rows), Col: clampSize(columns), Xpixel: clampSize(width), Ypixel: clampSize(height),
		})
	})
}

func clampSize(v uint32) uint16 { return uint16(min(v, 0xffff)) }

// control runs f on the descriptor without leaving non-blocking mode, as Fd would.
func control(file *os.File, f func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}

// endOfFile is what a person would type to end the input, or nothing when the
// terminal is in raw mode, where every byte is data.
func endOfFile(tty *os.File) []byte {
	var key []byte
	_ = control(tty, func(fd int) error {
		t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err == nil && t.Lflag&unix.ICANON != 0 && t.Cc[unix.VEOF] != 0 {
			key = []byte{t.Cc[unix.VEOF]}
		}
		return err
	})
	return key
}

// Opcodes of RFC 4254 section 8 and RFC 8160.
var controlCharacters = map[byte]int{
	1: unix.VINTR, 2: unix.VQUIT, 3: unix.VERASE, 4: unix.VKILL, 5: unix.VEOF, 6: unix.VEOL, 7: unix.VEOL2,
	8: unix.VSTART, 9: unix.VSTOP, 10: unix.VSUSP, 12: unix.VREPRINT, 13: unix.VWERASE, 14: unix.VLNEXT, 18: unix.VDISCARD,
}

var inputFlags = map[byte]uint32{
	30: unix.IGNPAR, 31: unix.PARMRK, 32: unix.INPCK, 33: unix.ISTRIP, 34: unix.INLCR, 35: unix.IGNCR, 36: unix.ICRNL,
	37: unix.IUCLC, 38: unix.IXON, 39: unix.IXANY, 40: unix.IXOFF, 41: unix.IMAXBEL, 42: unix.IUTF8,
}

var localFlags = map[byte]uint32{
	50: unix.ISIG, 51: unix.ICANON, 53: unix.ECHO, 54: unix.ECHOE, 55: unix.ECHOK, 56: unix.ECHONL, 57: unix.NOFLSH,
	58: unix.TOSTOP, 59: unix.IEXTEN, 60: unix.ECHOCTL, 61: unix.ECHOKE,
}

var outputFlags = map[byte]uint32{70: unix.OPOST, 71: unix.OLCUC, 72: unix.ONLCR, 73: unix.OCRNL, 74: unix.ONOCR, 75: unix.ONLRET}

// applyModes gives the new terminal the modes of the client's own, so that its
// erase key erases and UTF-8 is edited by character.
func applyModes(tty *os.File, modes string) error {
	return control(tty, func(fd int) error {
		t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err != nil {
			return err
		}
		for b := []byte(modes); len(b) >= 5 && b[0] != 0 && b[0] < 160; b = b[5:] {
			code, value := b[0], binary.BigEndian.Uint32(b[1:5])
			if i, ok := controlCharacters[code]; ok {
				if value == 255 { // no such key
					value = 0
				}
				t.Cc[i] = byte(value)
			}
			set(&t.Iflag, inputFlags[code], value)
			set(&t.Lflag, localFlags[code], value)
			set(&t.Oflag, outputFlags[code], value)
		}
		return unix.IoctlSetTermios(fd, unix.TCSETS, t)
	})
}

func set(flags *uint32, bit, value uint32) {
	if value != 0 {
		*flags |= bit
	} else {
		*flags &^= bit
	}
}
