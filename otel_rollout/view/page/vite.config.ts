import { defineConfig } from "vite";

// The same bytes on every machine: no hashes in names, no dates, no addresses of this folder.
export default defineConfig({
  base: "./",
  build: {
    outDir: process.env.OTEL_ROLLOUT_PAGE ?? "built",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    assetsInlineLimit: 0,
    rolldownOptions: {
      output: {
        codeSplitting: false,
        entryFileNames: "assets/app.js",
        assetFileNames: "assets/app[extname]",
      },
    },
  },
});
