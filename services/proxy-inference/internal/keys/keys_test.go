package keys

import (
	"crypto/rand"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/apikey"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var secret = []byte("hmac key of the test")

type clock struct {
	mu sync.Mutex
	t  time.Time
}

func (c *clock) now() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.t }
func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
}

// mint makes a key and its record.
func mint(t *testing.T, change func(*appv1.ApiKey)) (string, *appv1.ApiKey) {
	t.Helper()
	full, publicID, err := apikey.New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	k := &appv1.ApiKey{PublicId: publicID, Hmac: apikey.MAC(secret, full), Id: "k-" + publicID, ProjectId: "p-1", UserId: "u-1"}
	if change != nil {
		change(k)
	}
	return full, k
}

func tableOf(keys ...*appv1.ApiKey) (*Table, *clock) {
	c := &clock{t: time.Unix(1_800_000_000, 0)}
	t := New(c.now)
	t.Replace(&appv1.WatchApiKeysResponse{HmacKey: secret, Keys: keys})
	return t, c
}

func TestEveryKeyIsRefusedBeforeTheFirstTable(t *testing.T) {
	t.Parallel()
	full, _ := mint(t, nil)
	tab := New(time.Now)
	if _, v := tab.Check(full); v != NoTable {
		t.Errorf("verdict %v", v)
	}
	tab.Replace(&appv1.WatchApiKeysResponse{})
	if _, v := tab.Check(full); v != NoTable {
		t.Errorf("a table without an HMAC key gave verdict %v", v)
	}
}

func TestKeyUsedAMomentBeforeItsTableCameIsNotRefused(t *testing.T) {
	t.Parallel()
	full, record := mint(t, nil)
	tab, _ := tableOf()
	verdict := make(chan Verdict)
	go func() {
		_, v := tab.CheckSoon(t.Context(), full)
		verdict <- v
	}()
	for tab.waiting.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	tab.Replace(&appv1.WatchApiKeysResponse{HmacKey: secret, Keys: []*appv1.ApiKey{record}})
	if v := <-verdict; v != Good {
		t.Errorf("verdict %v", v)
	}
	if other, _ := mint(t, nil); func() Verdict { _, v := tab.CheckSoon(t.Context(), other); return v }() != Unknown {
		t.Error("a key that never comes was not refused")
	}
	if n := tab.waiting.Load(); n != 0 {
		t.Errorf("%d calls still wait", n)
	}
}

func TestKeyIsGoodUntilRevokedOrExpired(t *testing.T) {
	t.Parallel()
	plain, plainRecord := mint(t, nil)
	revoked, revokedRecord := mint(t, func(k *appv1.ApiKey) { k.Revoked = true })
	short, shortRecord := mint(t, func(k *appv1.ApiKey) { k.ExpiresAt = timestamppb.New(time.Unix(1_800_000_060, 0)) })
	stranger, _ := mint(t, nil)
	tab, c := tableOf(plainRecord, revokedRecord, shortRecord)
	expect := func(name, full string, want Verdict) {
		t.Helper()
		k, v := tab.Check(full)
		if v != want || (v == Good) != (k.ID != "") {
			t.Errorf("%s: verdict %v, want %v", name, v, want)
		}
	}
	expect("plain", plain, Good)
	expect("revoked", revoked, Revoked)
	expect("short-lived", short, Good)
	expect("stranger", stranger, Unknown)
	expect("cut", plain[:len(plain)-1], Malformed)
	c.pass(time.Minute)
	expect("short-lived a minute later", short, Expired)

	// The public id of one key with the secret of another.
	mixed := plain[:16] + stranger[16:49]
	expect("mixed", mixed+apikey.Checksum(mixed), Unknown)

	plainRecord.Revoked = true
	tab.Replace(&appv1.WatchApiKeysResponse{HmacKey: secret, Keys: []*appv1.ApiKey{plainRecord}})
	expect("plain after its revocation", plain, Revoked)
	expect("short-lived after its removal", short, Unknown)
}

func TestConcurrentPlacesComeBackAndAreNotGivenTwice(t *testing.T) {
	t.Parallel()
	full, record := mint(t, func(k *appv1.ApiKey) { k.ConcurrentRequests = 2 })
	tab, _ := tableOf(record)
	key, _ := tab.Check(full)
	one, ok1 := tab.Begin(key)
	two, ok2 := tab.Begin(key)
	if _, ok := tab.Begin(key); !ok1 || !ok2 || ok {
		t.Fatal("limit of two not kept")
	}
	one.End()
	one.End()
	three, ok := tab.Begin(key)
	if _, more := tab.Begin(key); !ok || more {
		t.Fatal("ending one place twice freed two")
	}
	// A new table does not forget what runs.
	tab.Replace(&appv1.WatchApiKeysResponse{HmacKey: secret})
	tab.Replace(&appv1.WatchApiKeysResponse{HmacKey: secret, Keys: []*appv1.ApiKey{record}})
	if _, more := tab.Begin(key); more {
		t.Fatal("a new table freed running places")
	}
	two.End()
	three.End()
	if _, ok := tab.Begin(key); !ok {
		t.Fatal("no place after all ended")
	}
}

func TestRefusedRequestsCostNothing(t *testing.T) {
	t.Parallel()
	full, record := mint(t, func(k *appv1.ApiKey) { k.RequestsPerMinute = 3 })
	tab, c := tableOf(record)
	key, _ := tab.Check(full)
	ask := func() (time.Duration, bool) {
		l, _ := tab.Begin(key)
		defer l.End()
		return l.Charge()
	}
	for range 3 {
		if _, ok := ask(); !ok {
			t.Fatal("refused within the budget")
		}
	}
	for range 100 {
		wait, ok := ask()
		if ok || wait <= 0 || wait > 20*time.Second {
			t.Fatalf("over the budget: wait %v, allowed %v", wait, ok)
		}
	}
	c.pass(20 * time.Second)
	if _, ok := ask(); !ok {
		t.Fatal("a hundred refusals burned the budget")
	}
	if _, ok := ask(); ok {
		t.Fatal("more than a third of the budget came back in 20 s")
	}
	c.pass(20 * time.Second)
	l, _ := tab.Begin(key)
	l.Charge()
	l.Refund()
	l.Refund()
	l.End()
	if _, ok := ask(); !ok {
		t.Fatal("a refund did not give the request back")
	}
	if _, ok := ask(); ok {
		t.Fatal("two refunds of one request gave two back")
	}
}

func TestAnonymousRequestsHaveNoKeyLimits(t *testing.T) {
	t.Parallel()
	var l Lease
	if _, ok := l.Charge(); !ok {
		t.Error("refused")
	}
	l.Refund()
	l.End()
}
