package cli

import (
	"fmt"
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

func (e *environment) keysCommand() *cobra.Command {
	c := &cobra.Command{Use: "api-keys", Short: "Keys for inference requests", Args: cobra.NoArgs, RunE: helpOnly}
	c.AddCommand(e.keysCreateCommand(), e.keysListCommand(), e.keysGetCommand(), e.keysUpdateCommand(), e.keysRevokeCommand(), e.keysUsageCommand())
	return c
}

func (e *environment) keysCreateCommand() *cobra.Command {
	var expiry int64
	c := &cobra.Command{
		Use: "create NAME", Short: "Make a key; it is shown once", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			body := map[string]any{"name": args[0]}
			if cmd.Flags().Changed("expiry-at") {
				body["expires_at"] = time.Unix(expiry, 0).UTC().Format(time.RFC3339)
			}
			var made struct {
				APIKey client.APIKey `json:"api_key"`
				Key    string        `json:"key"`
			}
			if err := api.Call(cmd.Context(), "POST", "/api/v1/api-keys", nil, nil, body, &made); err != nil {
				return err
			}
			return e.print(made, func(t *tableWriter) {
				t.row("id", made.APIKey.ID)
				t.row("name", made.APIKey.Name)
				t.row("key", made.Key)
				t.row("", "Save it now: it cannot be shown again.")
			})
		},
	}
	c.Flags().Int64Var(&expiry, "expiry-at", 0, "when it expires, Unix time in seconds (default: never)")
	return c
}

func (e *environment) printKeys(keys []client.APIKey, whole any) error {
	return e.print(whole, func(t *tableWriter) {
		t.row("ID", "NAME", "STATUS", "PUBLIC ID", "CREATED", "LAST USED", "EXPIRES")
		when := func(at *time.Time) string {
			if at == nil || at.IsZero() {
				return "-"
			}
			return at.Local().Format(time.DateTime)
		}
		for _, k := range keys {
			t.row(k.ID, k.Name, k.Status, k.PublicID, when(&k.CreatedAt), when(k.LastUsedAt), when(k.ExpiresAt))
		}
	})
}

func (e *environment) keysListCommand() *cobra.Command {
	var page, size int
	var status, sortBy, order string
	var total bool
	c := &cobra.Command{
		Use: "list", Short: "List your keys", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			q := url.Values{}
			set := func(flag, name, v string) {
				if cmd.Flags().Changed(flag) {
					q.Set(name, v)
				}
			}
			set("page", "page", strconv.Itoa(page))
			set("page-size", "page_size", strconv.Itoa(size))
			set("status", "status", status)
			set("sort-by", "sort_by", sortBy)
			set("sort-order", "sort_order", order)
			set("include-total", "include_total", strconv.FormatBool(total))
			var list struct {
				APIKeys []client.APIKey `json:"api_keys"`
				Total   *int            `json:"total,omitempty"`
			}
			if err := api.Call(cmd.Context(), "GET", "/api/v1/api-keys", q, nil, nil, &list); err != nil {
				return err
			}
			return e.printKeys(list.APIKeys, list)
		},
	}
	f := c.Flags()
	f.IntVar(&page, "page", 1, "page, from 1")
	f.IntVar(&size, "page-size", 20, "1 to 100")
	f.StringVar(&status, "status", "all", "active, revoked or all")
	f.StringVar(&sortBy, "sort-by", "created_at", "created_at, updated_at, name or last_used_at")
	f.StringVar(&order, "sort-order", "desc", "asc or desc")
	f.BoolVar(&total, "include-total", false, "count all")
	return c
}

func (e *environment) keysGetCommand() *cobra.Command {
	return &cobra.Command{
		Use: "get ID", Short: "Show one key", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			var k client.APIKey
			if err := api.Call(cmd.Context(), "GET", "/api/v1/api-keys/"+url.PathEscape(args[0]), nil, nil, nil, &k); err != nil {
				return err
			}
			return e.printKeys([]client.APIKey{k}, k)
		},
	}
}

func (e *environment) keysUpdateCommand() *cobra.Command {
	var name string
	c := &cobra.Command{
		Use: "update ID", Short: "Rename an active key", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			var k client.APIKey
			if err := api.Call(cmd.Context(), "PATCH", "/api/v1/api-keys/"+url.PathEscape(args[0]), nil, nil, map[string]string{"name": name}, &k); err != nil {
				return err
			}
			return e.printKeys([]client.APIKey{k}, k)
		},
	}
	c.Flags().StringVar(&name, "name", "", "the new name")
	return c
}

func (e *environment) keysRevokeCommand() *cobra.Command {
	return &cobra.Command{
		Use: "revoke ID", Short: "Make a key useless; its usage stays", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			if err := api.Call(cmd.Context(), "POST", "/api/v1/api-keys/"+url.PathEscape(args[0])+"/revoke", nil, nil, nil, nil); err != nil {
				return err
			}
			fmt.Fprintf(e.out, "revoked %s\n", args[0])
			return nil
		},
	}
}

func (e *environment) keysUsageCommand() *cobra.Command {
	var ids, granularity string
	var start, end int64
	c := &cobra.Command{
		Use: "usage", Short: "Tokens and requests by key and time", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := e.client()
			if err != nil {
				return err
			}
			q := url.Values{}
			if ids != "" {
				q.Set("api_key_id", ids)
			}
			if start > 0 {
				q.Set("ts_start", strconv.FormatInt(start, 10))
			}
			if end > 0 {
				q.Set("ts_end", strconv.FormatInt(end, 10))
			}
			q.Set("granularity", granularity)
			var list struct {
				Buckets []client.UsageBucket `json:"buckets"`
			}
			if err := api.Call(cmd.Context(), "GET", "/api/v1/api-keys/usage", q, nil, nil, &list); err != nil {
				return err
			}
			return e.print(list, func(t *tableWriter) {
				t.row("FROM", "KEY", "REQUESTS", "PROMPT TOKENS", "COMPLETION TOKENS", "TOTAL TOKENS")
				for _, b := range list.Buckets {
					t.row(time.UnixMilli(b.StartMS).UTC().Format(time.RFC3339), orDash(b.APIKeyID), b.Requests, b.PromptTokens, b.CompletionTokens, b.TotalTokens)
				}
			})
		},
	}
	f := c.Flags()
	f.StringVar(&ids, "api-key-id", "", "comma-separated ids (default: all)")
	f.Int64Var(&start, "ts-start", 0, "from, Unix time in milliseconds")
	f.Int64Var(&end, "ts-end", 0, "to, Unix time in milliseconds")
	f.StringVar(&granularity, "granularity", "day", "hour, day, week or month")
	return c
}
