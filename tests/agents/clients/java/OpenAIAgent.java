import com.fasterxml.jackson.databind.ObjectMapper;
import com.openai.client.okhttp.OpenAIOkHttpClient;
import com.openai.core.JsonValue;
import com.openai.helpers.ChatCompletionAccumulator;
import com.openai.models.FunctionDefinition;
import com.openai.models.FunctionParameters;
import com.openai.models.chat.completions.ChatCompletionCreateParams;
import com.openai.models.chat.completions.ChatCompletionFunctionTool;
import com.openai.models.chat.completions.ChatCompletionToolMessageParam;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;

/**
 * An agent on OpenAI's Java client (OkHttp): streamed, with a tool. Its argument is a list of
 * questions; the address and the key come from the environment.
 */
class OpenAIAgent {
    static final Map<String, Object> COMMAND =
            Map.of("type", "object", "properties", Map.of("command", Map.of("type", "string")));

    public static void main(String[] arguments) throws Exception {
        var json = new ObjectMapper();
        var client = OpenAIOkHttpClient.fromEnv().withOptions(options -> options.maxRetries(0));
        var parameters = FunctionParameters.builder();
        COMMAND.forEach((name, value) -> parameters.putAdditionalProperty(name, JsonValue.from(value)));
        var function = FunctionDefinition.builder()
                .name("shell")
                .description("Run a shell command")
                .parameters(parameters.build())
                .build();
        var request = ChatCompletionCreateParams.builder()
                .model("m")
                .addSystemMessage("You are helpful. Žluťoučký kůň 🐎")
                .addTool(ChatCompletionFunctionTool.builder().function(function).build());
        for (String question : json.readValue(arguments[0], String[].class)) {
            request.addUserMessage(question);
            for (boolean done = false; !done; ) {
                var gathered = ChatCompletionAccumulator.create();
                try (var stream = client.chat().completions().createStreaming(request.build())) {
                    stream.stream().forEach(gathered::accumulate);
                }
                var message = gathered.chatCompletion().choices().get(0).message();
                request.addMessage(message);
                done = message.toolCalls().orElse(List.of()).isEmpty();
                for (var call : message.toolCalls().orElse(List.of())) {
                    var asked = call.asFunction();
                    var command = json.readTree(asked.function().arguments()).get("command").asText();
                    var shell = new ProcessBuilder("sh", "-c", command).start();
                    request.addMessage(ChatCompletionToolMessageParam.builder()
                            .toolCallId(asked.id())
                            .content(new String(shell.getInputStream().readAllBytes(), StandardCharsets.UTF_8))
                            .build());
                }
                if (done) {
                    var out = new java.io.PrintStream(System.out, true, StandardCharsets.UTF_8);
                    out.print(message.content().orElse("") + "\n");
                }
            }
        }
        client.close();
    }
}
