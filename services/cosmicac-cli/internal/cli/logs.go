package cli

import (
	"context"
	"fmt"
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

func (e *environment) jobsLogsCommand() *cobra.Command {
	var tail int
	c := e.jobCommand("logs", "Show a job's last log lines, also of a stopped one", func(ctx context.Context, api *client.Client, id string) error {
		var answer struct {
			Data struct {
				Lines []struct {
					Time     time.Time `json:"time"`
					Instance string    `json:"instance"`
					Source   string    `json:"source"`
					Text     string    `json:"text"`
					Gap      bool      `json:"gap"`
				} `json:"lines"`
			} `json:"data"`
		}
		q := url.Values{"job_id": {id}, "tail": {strconv.Itoa(tail)}}
		if err := api.Call(ctx, "GET", "/monitor/api/v1/logs", q, nil, nil, &answer); err != nil {
			return err
		}
		if e.output != "table" {
			return e.print(answer.Data, nil)
		}
		for _, l := range answer.Data.Lines {
			if l.Gap {
				fmt.Fprintln(e.out, "-- lines are missing here --")
			}
			fmt.Fprintf(e.out, "%s %s %s\n", l.Time.Local().Format(time.TimeOnly), l.Source, printable(l.Text))
		}
		return nil
	})
	c.Flags().IntVar(&tail, "tail", 200, "how many lines, 1 to 10000")
	return c
}
