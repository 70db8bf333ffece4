"""The project's own data: sentences in Korean and English, captioned pictures and clips, and stories."""
