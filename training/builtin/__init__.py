"""The project's own data: sentences in Korean and English, stories, captioned pictures and clips."""
