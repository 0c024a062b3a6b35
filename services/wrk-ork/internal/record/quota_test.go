package record

import (
	"testing"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func TestTheNewestQuotaStaysInWhateverOrderTheyCome(t *testing.T) {
	t.Parallel()
	s, ctx := open(t, t.TempDir()), t.Context()
	put := func(quotas ...*orkv1.ProjectQuota) {
		t.Helper()
		if err := s.PutQuotas(ctx, quotas); err != nil {
			t.Fatal(err)
		}
	}
	if q, held, err := s.Quota(ctx, "p-1"); q != nil || held != 0 || err != nil {
		t.Errorf("what was never told is %v, %d, %v", q, held, err)
	}
	put(&orkv1.ProjectQuota{ProjectId: "p-1", Revision: 7, MaximumGpus: 4}, &orkv1.ProjectQuota{ProjectId: "p-2", Revision: 1, Unlimited: true})
	put(&orkv1.ProjectQuota{ProjectId: "p-1", Revision: 6, Unlimited: true})
	put(&orkv1.ProjectQuota{ProjectId: "p-1", Revision: 7, MaximumGpus: 99})
	all, err := s.Quotas(ctx)
	if err != nil || len(all) != 2 || all["p-1"].Unlimited || all["p-1"].MaximumGpus != 4 || !all["p-2"].Unlimited {
		t.Errorf("kept %v: %v", all, err)
	}
	put(&orkv1.ProjectQuota{ProjectId: "p-1", Revision: 8, MaximumGpus: 1})
	if q, _, err := s.Quota(ctx, "p-1"); err != nil || q.MaximumGpus != 1 || q.Revision != 8 {
		t.Errorf("the newer one is not kept: %v %v", q, err)
	}
}
