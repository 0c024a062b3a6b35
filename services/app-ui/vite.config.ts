import { defineConfig } from 'vite';

// Assets are served by Caddy under the site's root; nothing is inlined, so that
// the page works under a content security policy without inline scripts.
export default defineConfig({
  esbuild: { jsx: 'automatic' },
  build: { assetsInlineLimit: 0, sourcemap: false, modulePreload: { polyfill: false }, chunkSizeWarningLimit: 900,
    // The component library marks its files for server rendering; here that means nothing.
    rollupOptions: { onwarn: (warning, warn) => { if (warning.code !== 'MODULE_LEVEL_DIRECTIVE') warn(warning); } } },
});
