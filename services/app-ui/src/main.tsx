import '@mantine/core/styles.css';
import { createTheme, MantineProvider } from '@mantine/core';
import { QueryClient, QueryClientProvider } from '@tanstack/react-query';
import { StrictMode } from 'react';
import { createRoot } from 'react-dom/client';
import { App } from './App';
import { APIError } from './api';

const theme = createTheme({ primaryColor: 'indigo', defaultRadius: 'md' });
const queries = new QueryClient({
  defaultOptions: { queries: { retry: (n, e) => n < 2 && e instanceof APIError && (e.status === 0 || e.status >= 500), refetchOnWindowFocus: true } },
});

createRoot(document.getElementById('root')!).render(
  <StrictMode>
    <MantineProvider theme={theme} defaultColorScheme="auto">
      <QueryClientProvider client={queries}><App /></QueryClientProvider>
    </MantineProvider>
  </StrictMode>,
);
