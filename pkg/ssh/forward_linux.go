package ssh

import (
	"context"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
)

// forward makes one TCP connection from inside the VM. Its errors are its own:
// neither its end nor its reset touches the connection's other channels.
func (c *connection) forward(ctx context.Context, n ssh.NewChannel) {
	if !c.access.has(RightForward) {
		_ = n.Reject(ssh.Prohibited, "the grant does not hold the right \"forward\"")
		return
	}
	var d directTCP
	if ssh.Unmarshal(n.ExtraData(), &d) != nil || d.Port == 0 || d.Port > 65535 || d.Host == "" || len(d.Host) > 255 {
		_ = n.Reject(ssh.ConnectionFailed, "not an address")
		return
	}
	address := net.JoinHostPort(d.Host, strconv.Itoa(int(d.Port)))
	dial, cancel := context.WithTimeout(ctx, 10*time.Second)
	target, err := c.server.options.Dial(dial, "tcp", address)
	cancel()
	if err != nil {
		_ = n.Reject(ssh.ConnectionFailed, "connect to "+address+" from inside the VM: "+err.Error())
		return
	}
	defer target.Close()
	channel, requests, err := n.Accept()
	if err != nil {
		return
	}
	defer channel.Close()
	stop := context.AfterFunc(ctx, func() { target.Close() })
	defer stop()
	var requestsEnd, back sync.WaitGroup
	requestsEnd.Go(func() {
		ssh.DiscardRequests(requests)
		target.Close() // the client closed the channel, with or without an end of its data
	})
	back.Go(func() {
		if _, err := io.Copy(channel, target); err != nil {
			_ = channel.Close() // a reset is passed on as a close, not as an orderly end
			return
		}
		_ = channel.CloseWrite()
	})
	if _, err := io.Copy(target, channel); err == nil {
		if half, ok := target.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
		}
	} else {
		target.Close()
	}
	back.Wait()
	_ = channel.Close()
	requestsEnd.Wait()
}
