// An agent on OpenAI's Go client: streamed, with a tool. Its argument is a list of questions; the
// address and the key come from the environment.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"os/exec"

	"github.com/openai/openai-go/v3"
)

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	var questions []string
	check(json.Unmarshal([]byte(os.Args[1]), &questions))
	client := openai.NewClient()
	params := openai.ChatCompletionNewParams{
		Model:    "m",
		Messages: []openai.ChatCompletionMessageParamUnion{openai.SystemMessage("You are helpful. Žluťoučký kůň 🐎")},
		Tools: []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(openai.FunctionDefinitionParam{
			Name:        "shell",
			Description: openai.String("Run a shell command"),
			Parameters: openai.FunctionParameters{
				"type":       "object",
				"properties": map[string]any{"command": map[string]string{"type": "string"}},
			},
		})},
	}
	for _, question := range questions {
		params.Messages = append(params.Messages, openai.UserMessage(question))
		for {
			stream := client.Chat.Completions.NewStreaming(context.Background(), params)
			gathered := openai.ChatCompletionAccumulator{}
			for stream.Next() {
				gathered.AddChunk(stream.Current())
			}
			check(stream.Err())
			message := gathered.Choices[0].Message
			params.Messages = append(params.Messages, message.ToParam())
			if len(message.ToolCalls) == 0 {
				fmt.Println(message.Content)
				break
			}
			for _, call := range message.ToolCalls {
				var arguments struct{ Command string }
				check(json.Unmarshal([]byte(call.Function.Arguments), &arguments))
				out, err := exec.Command("sh", "-c", arguments.Command).Output()
				check(err)
				params.Messages = append(params.Messages, openai.ToolMessage(string(out), call.ID))
			}
		}
	}
}
