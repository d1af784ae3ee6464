import com.fasterxml.jackson.databind.ObjectMapper;
import dev.langchain4j.agent.tool.P;
import dev.langchain4j.agent.tool.Tool;
import dev.langchain4j.memory.chat.MessageWindowChatMemory;
import dev.langchain4j.model.openai.OpenAiChatModel;
import dev.langchain4j.service.AiServices;
import dev.langchain4j.service.SystemMessage;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;

/**
 * An agent on langchain4j, which asks by the JDK's own HTTP client: with a tool. Its argument is a
 * list of questions; the address and the key come from the environment.
 */
class LangChain4jAgent {
    interface Assistant {
        @SystemMessage("You are helpful. Žluťoučký kůň 🐎")
        String answer(String question);
    }

    static class Shell {
        @Tool("Run a shell command")
        String shell(@P(name = "command", description = "what to run") String command) throws Exception {
            var process = new ProcessBuilder("sh", "-c", command).start();
            return new String(process.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
        }
    }

    public static void main(String[] arguments) throws Exception {
        var model = OpenAiChatModel.builder()
                .baseUrl(System.getenv("OPENAI_BASE_URL"))
                .apiKey(System.getenv("OPENAI_API_KEY"))
                .modelName("m")
                .maxRetries(0)
                .build();
        var assistant = AiServices.builder(Assistant.class)
                .chatModel(model)
                .tools(new Shell())
                .chatMemory(MessageWindowChatMemory.withMaxMessages(99))
                .build();
        var out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        for (String question : new ObjectMapper().readValue(arguments[0], String[].class)) {
            out.print(assistant.answer(question) + "\n");
        }
    }
}
