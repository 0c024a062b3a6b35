package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

func (e *environment) inferenceCommand() *cobra.Command {
	c := &cobra.Command{Use: "inference", Short: "Talk to a Managed Inference Job", Args: cobra.NoArgs, RunE: helpOnly}
	var model, keyFile, endpoint, system string
	var maxTokens int
	var noStream bool
	chat := &cobra.Command{
		Use:   "chat PROMPT",
		Short: "One chat completion; the API key comes from COSMICAC_API_KEY or --key-file",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := e.settings()
			if err != nil {
				return err
			}
			if s.URL == "" {
				return fault.New(fault.Invalid, "no control plane: give --url or log in")
			}
			key := os.Getenv("COSMICAC_API_KEY")
			if keyFile != "" {
				raw, err := os.ReadFile(keyFile)
				if err != nil {
					return fault.Wrap(fault.Invalid, err, "read --key-file %s", keyFile)
				}
				key = strings.TrimSpace(string(raw))
			}
			path := "/inference/v1/chat/completions"
			if endpoint != "" {
				path = "/inference/e/" + endpoint + "/v1/chat/completions"
			}
			var messages []map[string]string
			if system != "" {
				messages = append(messages, map[string]string{"role": "system", "content": system})
			}
			messages = append(messages, map[string]string{"role": "user", "content": args[0]})
			body := map[string]any{"model": model, "messages": messages, "stream": !noStream}
			if !noStream {
				body["stream_options"] = map[string]bool{"include_usage": true}
			}
			if maxTokens > 0 {
				body["max_tokens"] = maxTokens
			}
			raw, err := json.Marshal(body)
			if err != nil {
				return err
			}
			req, err := http.NewRequestWithContext(cmd.Context(), "POST", strings.TrimSuffix(s.URL, "/")+path, bytes.NewReader(raw))
			if err != nil {
				return fault.Wrap(fault.Invalid, err, "inference request to %s", s.URL)
			}
			req.Header.Set("Content-Type", "application/json")
			if key != "" {
				req.Header.Set("Authorization", "Bearer "+key)
			}
			started := time.Now()
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				return fault.Wrap(fault.Unreachable, err, "inference endpoint %s does not answer", s.URL)
			}
			defer res.Body.Close()
			if res.StatusCode != http.StatusOK {
				return openAIProblem(res)
			}
			return e.printCompletion(res.Body, !noStream, started)
		},
	}
	f := chat.Flags()
	f.StringVar(&model, "model", "", "model name")
	f.StringVar(&keyFile, "key-file", "", "file with the API key")
	f.StringVar(&endpoint, "endpoint", "", "one endpoint exactly, by id")
	f.StringVar(&system, "system", "", "system message")
	f.IntVar(&maxTokens, "max-tokens", 0, "at most this many tokens (0: the engine's default)")
	f.BoolVar(&noStream, "no-stream", false, "wait for the whole answer")
	c.AddCommand(chat)
	return c
}

// completion is the part of OpenAI's answer and chunk that is printed.
type completion struct {
	Choices []struct {
		Delta   struct{ Content string } `json:"delta"`
		Message struct{ Content string } `json:"message"`
	} `json:"choices"`
	Usage *struct {
		PromptTokens     int `json:"prompt_tokens"`
		CompletionTokens int `json:"completion_tokens"`
		TotalTokens      int `json:"total_tokens"`
	} `json:"usage"`
	Error *struct {
		Message string `json:"message"`
	} `json:"error"`
}

func (e *environment) printCompletion(body io.Reader, stream bool, started time.Time) error {
	var last completion
	var first time.Duration
	chunks := 0
	if !stream {
		if err := json.NewDecoder(io.LimitReader(body, 64<<20)).Decode(&last); err != nil {
			return fault.Wrap(fault.Internal, err, "the answer is not a completion")
		}
		for _, c := range last.Choices {
			fmt.Fprintln(e.out, c.Message.Content)
		}
	} else {
		done := false
		err := client.ReadEvents(body, func(ev client.Event) bool {
			if string(ev.Data) == "[DONE]" {
				done = true
				return false
			}
			var c completion
			if json.Unmarshal(ev.Data, &c) != nil {
				return true
			}
			if c.Error != nil {
				last.Error = c.Error
				return false
			}
			for _, ch := range c.Choices {
				if ch.Delta.Content == "" {
					continue
				}
				if chunks == 0 {
					first = time.Since(started)
				}
				chunks++
				fmt.Fprint(e.out, ch.Delta.Content)
			}
			if c.Usage != nil {
				last.Usage = c.Usage
			}
			return true
		})
		fmt.Fprintln(e.out)
		if last.Error != nil {
			return fault.New(fault.Unavailable, "the stream broke: %s", last.Error.Message)
		}
		if !done {
			return fault.Wrap(fault.Unavailable, err, "the stream ended before it was complete")
		}
		fmt.Fprintf(e.err, "first token after %d ms, %d chunks in %d ms\n", first.Milliseconds(), chunks, time.Since(started).Milliseconds())
	}
	if last.Usage != nil {
		fmt.Fprintf(e.err, "usage: %d prompt + %d completion = %d tokens\n", last.Usage.PromptTokens, last.Usage.CompletionTokens, last.Usage.TotalTokens)
	}
	return nil
}

func openAIProblem(res *http.Response) error {
	raw, _ := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	var p struct {
		Error struct {
			Message string `json:"message"`
			Code    string `json:"code"`
		} `json:"error"`
	}
	kind := fault.Unavailable
	for _, k := range fault.Kinds() {
		if k.HTTP() == res.StatusCode {
			kind = k
			break
		}
	}
	if json.Unmarshal(raw, &p) == nil && p.Error.Message != "" {
		if p.Error.Code != "" {
			return fault.New(kind, "%s (%s)", p.Error.Message, p.Error.Code)
		}
		return fault.New(kind, "%s", p.Error.Message)
	}
	return fault.New(kind, "the inference endpoint answered %s", res.Status)
}
